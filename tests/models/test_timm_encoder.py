"""What of timm is taken, and what is refused."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.models import timm_encoder
from peclr_dali.models.encoders import make_encoder


def _with_dropout(*names: str, **options: Any) -> Any:
    """test_vit with every kind of rate that a transformer of timm has; importing timm costs a second."""
    from timm import models

    create: Any = models.create_model  # timm's own function, whatever stands for `timm.create_model`
    rates = {"drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "patch_drop_rate"}
    return create(*names, **options, **dict.fromkeys(rates, 0.5))


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_and_stochastic_depth_are_off(fused: bool) -> None:
    model = _with_dropout("test_vit", num_classes=0, img_size=32)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", fused)  # noqa: B010  - torch types it as a module
    first, second = timm_encoder._two_passes(model, 32)
    assert not torch.allclose(first, second, rtol=1e-3)
    timm_encoder._disable_dropout(model)
    first, second = timm_encoder._two_passes(model, 32)
    assert torch.equal(first, second)


def test_a_network_that_stays_random_is_refused() -> None:
    with (
        patch("timm.create_model", _with_dropout),
        patch.object(timm_encoder, "_disable_dropout"),
        pytest.raises(UserError, match=r"'timm/test_vit' is random in training, so recomputing differs"),
    ):
        make_encoder("timm/test_vit", 32)

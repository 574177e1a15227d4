"""What of timm is taken, and what is refused."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import ValidationError

from peclr_dali.errors import UserError
from peclr_dali.models import timm_encoder
from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.encoders import build_encoder, make_encoder


def _create(*names: str, **options: Any) -> torch.nn.Module:
    """timm's own function, whatever stands for `timm.create_model`; importing timm costs a second."""
    from timm import models

    create: Any = models.create_model
    model: torch.nn.Module = create(*names, **options)
    return model


def _with_dropout(*names: str, **options: Any) -> torch.nn.Module:
    """test_vit with every kind of rate that a transformer of timm has."""
    rates = {"drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "patch_drop_rate"}
    return _create(*names, **options, **dict.fromkeys(rates, 0.5))


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_and_stochastic_depth_are_off(fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = _with_dropout("test_vit", num_classes=0, img_size=32)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", fused)  # noqa: B010  - torch types it as a module
    first, second = timm_encoder._two_passes(model, 32)
    assert not torch.allclose(first, second, rtol=1e-3)
    assert timm_encoder._disable_dropout(model)
    first, second = timm_encoder._two_passes(model, 32)
    assert torch.equal(first, second)
    assert not timm_encoder._disable_dropout(model)
    with patch("timm.create_model", _with_dropout), caplog.at_level(logging.INFO):
        make_encoder("timm/test_vit", 32)
    assert caplog.messages == [
        "timm/test_vit: dropout and stochastic depth are off, since a recomputed pass must equal the first"
    ]


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet"])
def test_a_network_without_dropout_is_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_encoder(EncoderConfig(f"timm/{name}", "random"), 32)
    assert caplog.messages == []


def test_a_network_that_stays_random_is_refused() -> None:
    with (
        patch("timm.create_model", _with_dropout),
        patch.object(timm_encoder, "_disable_dropout"),
        pytest.raises(UserError, match=r"'timm/test_vit' is random in training mode, so recomputing differs"),
    ):
        make_encoder("timm/test_vit", 32)


@pytest.mark.parametrize(
    ("name", "side_px", "message"),
    [
        ("vit_smal_patch16_224", 32, r"has no model of this name; did you mean 'timm/vit_small_patch16_224'\?"),
        ("qqqqq", 32, r"has no model of this name; timm.list_models\(\) lists all names"),
        ("test_vit", 40, r"side_px = 40: timm cannot build it .expected a multiple of its patch size, 16 pixels"),
        ("vit_small_patch16_224", 8, r"side_px = 8: timm cannot build it .expected a multiple of its patch size, 16"),
        ("vgg11", 8, r"side_px = 8: timm cannot build it .*expect 224-pixel views. Set geometry.side_px"),
    ],
)
def test_what_does_not_fit_is_one_line(name: str, side_px: int, message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message) as caught:
        make_encoder(f"timm/{name}", side_px)
    assert "\n" not in str(caught.value)


def test_timm_is_optional() -> None:
    with (
        patch.dict("sys.modules", timm=None),
        pytest.raises(UserError, match=r"'timm/test_vit' needs the package timm.*pip install 'peclr-dali\[timm\]'"),
    ):
        make_encoder("timm/test_vit", 32)


def test_the_configuration_checks_only_the_family() -> None:
    assert EncoderConfig("timm/anything").name == "timm/anything"
    for unknown in ("timm", "tim/test_vit", "test_vit", "resnet20", ""):
        with pytest.raises(ValidationError, match=r"'resnet50'.* or a model of timm such as 'timm/vit_small"):
            EncoderConfig(unknown)


def test_building_takes_no_random_number_and_leaves_batch_norm_as_it_is() -> None:
    torch.manual_seed(0)
    _create("test_resnet", num_classes=0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    encoder = make_encoder("timm/test_resnet", 32)
    assert torch.equal(torch.rand(1), expected)
    fresh = _create("test_resnet", num_classes=0).state_dict()
    for key, value in encoder.library_state_dict().items():
        assert not key.endswith(("running_mean", "running_var", "tracked")) or torch.equal(value, fresh[key])


def test_published_weights_that_cannot_be_downloaded_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def offline(name: str, pretrained: bool = False, **options: Any) -> torch.nn.Module:
        if pretrained:
            for talker in ("huggingface_hub.file_download", "timm.models._builder"):
                logging.getLogger(talker).warning("cannot load")
            raise FileNotFoundError("no route\nto host")
        return _create(name, **options)

    with (
        patch("timm.create_model", offline),
        pytest.raises(
            UserError, match=r'test_vit cannot be downloaded \(no route to host\): set encoder.weights = "random"'
        ),
    ):
        build_encoder(EncoderConfig("timm/test_vit"), 32)
    assert caplog.messages == []  # the error has it all


def test_published_weights_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    published = _create("test_vit", num_classes=0, img_size=32)

    def online(name: str, pretrained: bool = False, **options: Any) -> torch.nn.Module:
        return published if pretrained else _create(name, **options)

    with patch("timm.create_model", online), caplog.at_level(logging.WARNING):
        encoder = build_encoder(EncoderConfig("timm/test_vit"), 32)
    wanted = published.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in encoder.library_state_dict().items())
    assert len(caplog.messages) == 1
    assert "deviation (0.5, 0.5, 0.5); this project uses those of ImageNet" in caplog.messages[0]

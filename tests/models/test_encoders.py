"""Encoders: files of torchvision's weights, and what of timm is taken and refused."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torchvision

from peclr_dali.errors import UserError
from peclr_dali.models import timm_encoder
from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.weights import load_strictly


def save_resnet18(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torchvision.models.resnet18(weights=None).state_dict()
    saved = {f"module.{name}": tensor for name, tensor in state.items()} if "parallel" in path.name else state
    if "safetensors" in path.name.lower():
        safetensors.torch.save_file(saved, path)
    else:
        torch.save({"state_dict": saved} if "nested" in path.name else saved, path)
    return state


@pytest.mark.parametrize("file", ["nested.pth", "parallel.pth", "plain.SAFETENSORS", "safetensors.pth"])
def test_reads_torchvision_files_and_gives_them_back(file: str, tmp_path: Path) -> None:
    state = save_resnet18(tmp_path / file)
    exported = build_encoder(EncoderConfig("resnet18", str(tmp_path / file))).library_state_dict()
    assert list(exported) == [name for name in state if not name.startswith("fc.")]
    assert all(torch.equal(exported[name], state[name]) for name in exported)
    resnet = torchvision.models.resnet18(weights=None)
    assert resnet.load_state_dict(exported, strict=False).missing_keys == ["fc.weight", "fc.bias"]


def test_features_are_torchvisions_pooled_ones() -> None:
    encoder = build_encoder(EncoderConfig("resnet18", "random")).eval()
    assert encoder.feature_dim == 512
    resnet = torchvision.models.resnet18(weights=None).eval()
    resnet.load_state_dict(encoder.library_state_dict(), strict=False)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert encoder(image).shape == (2, 512)
        assert torch.equal(resnet.fc(encoder(image)), resnet(image))


def test_wrong_files_end_in_one_line(tmp_path: Path) -> None:
    state = save_resnet18(tmp_path / "good.pth")
    variance = "layer1.0.bn1.running_var"
    (tmp_path / "garbage.safetensors").write_bytes(b"<html>not found</html>")
    (tmp_path / "truncated.pth").write_bytes((tmp_path / "good.pth").read_bytes()[:100_000])
    for file, content in {
        "no_state.pth": {"epoch": 3},
        "module.pth": torchvision.models.resnet18(weights=None),  # code, not tensors
        "large.pth": {**state, variance: torch.full((64,), 1e300, dtype=torch.float64)},
        "meta.pth": {**state, "conv1.weight": torch.zeros(64, 3, 7, 7, device="meta")},
        "int8.pth": {**state, "conv1.weight": torch.ones(64, 3, 7, 7, dtype=torch.int8)},
        "gray.pth": {**state, "conv1.weight": torch.zeros(64, 1, 7, 7)},
    }.items():
        torch.save(content, tmp_path / file)
    for file, message in {
        "absent.pth": "does not exist",
        "garbage.safetensors": "cannot be read",
        "truncated.pth": "cannot be read",
        "no_state.pth": "holds no tensors by name",
        "module.pth": "cannot be read",
        "large.pth": f"{variance} holds NaN or infinity; expected",
        "meta.pth": "conv1.weight holds no plain numbers",
        "int8.pth": r"conv1.weight has numbers of torch.int8, and not of torch.float32",
        "gray.pth": r"conv1.weight has the shape \(64, 1, 7, 7\), and not",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            build_encoder(EncoderConfig("resnet18", str(tmp_path / file)))
        assert "\n" not in str(caught.value)
        assert file in str(caught.value)
    with pytest.raises(UserError, match=r"does not fit encoder.name = 'resnet34': .*layer1.2.conv1.weight"):
        build_encoder(EncoderConfig("resnet34", str(tmp_path / "good.pth")))


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


def test_of_many_tensors_that_do_not_fit_three_are_named() -> None:
    other = {name: torch.ones(1) for name in "abc"}
    expected = "a.pth does not fit linear: weight is missing, bias is missing, a is not known, and 2 more. Name another"
    with pytest.raises(UserError, match=expected):
        load_strictly(torch.nn.Linear(1, 1), other, origin="a.pth", model="linear")

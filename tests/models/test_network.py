"""Normalisation of pixels, and the projection head."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peclr_dali.models.config import ProjectorConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD, Normalize, build_projector


def every_pixel(layout: torch.memory_format) -> torch.Tensor:
    """(2, 3, 16, 16): every value in every channel."""
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    return values.contiguous(memory_format=layout)


LAYOUTS = [torch.channels_last, torch.contiguous_format]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pixels_have_imagenets_mean_and_deviation(layout: torch.memory_format) -> None:
    pixels = every_pixel(layout)
    mean, std = (torch.tensor(numbers).double()[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    normalised = Normalize()(pixels)
    torch.testing.assert_close(normalised.double(), (pixels.double() / 255 - mean) / std, atol=1e-6, rtol=0)
    assert normalised.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gets_the_rounded_float32_in_one_pass(dtype: torch.dtype, layout: torch.memory_format) -> None:
    pixels, normalize, passes = every_pixel(layout), Normalize(), []

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            passes.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype), Passes():
        rounded = normalize(pixels)
    assert passes == ["aten.empty_like.default", "aten.addcmul.out"]
    assert rounded.dtype == dtype
    assert rounded.is_contiguous(memory_format=layout)
    assert torch.equal(rounded, normalize(pixels).to(dtype))


@pytest.mark.parametrize(
    ("module", "pixels", "message"),
    [
        (
            Normalize(),
            every_pixel(LAYOUTS[0]) / 255,
            r"of torch.float32, expected uint8 .*: leave out '/ 255'",
        ),
        (make_encoder("resnet18"), every_pixel(LAYOUTS[0]), "image is of torch.uint8, expected floats: divide by 255"),
    ],
)
def test_pixels_in_another_unit_are_named(module: nn.Module, pixels: torch.Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        module(pixels)


def test_the_projection_head_is_the_authors() -> None:
    head = build_projector(ProjectorConfig(), feature_dim=32)
    assert [type(layer) for layer in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    shapes = [tuple(value.shape) for value in head.parameters()]
    assert shapes == [(512, 32), (512,), (512,), (512,), (128, 512)]  # the last layer without bias
    assert head(torch.randn(4, 32)).shape == (4, 128)

"""Normalisation of pixels."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.network import IMAGENET_MEAN, IMAGENET_STD, Normalize


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

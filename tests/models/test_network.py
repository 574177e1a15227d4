"""Normalisation of pixels, the projection head, and the health of embeddings."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali.models.config import ProjectorConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD, Normalize, build_projector, health
from tests.train.tiny_step import Operators


def every_pixel(layout: torch.memory_format) -> torch.Tensor:
    """(2, 3, 16, 16): every value in every channel."""
    return torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16).contiguous(memory_format=layout)


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
    pixels, normalize = every_pixel(layout), Normalize()
    with torch.autocast("cpu", dtype), Operators() as passes:
        rounded = normalize(pixels)
    assert passes.counts == {("empty_like", torch.uint8): 1, ("addcmul", torch.float32): 1}  # into what is empty
    assert rounded.dtype == dtype
    assert rounded.is_contiguous(memory_format=layout)
    assert torch.equal(rounded, normalize(pixels).to(dtype))


def test_pixels_in_another_unit_are_named() -> None:
    with pytest.raises(TypeError, match=r"of torch.float32, expected uint8 .*: leave out '/ 255'"):
        Normalize()(every_pixel(LAYOUTS[0]) / 255)
    with pytest.raises(TypeError, match=r"image is of torch.uint8, expected floats: divide by 255"):
        make_encoder("resnet18")(every_pixel(LAYOUTS[0]))


def test_the_projection_head_is_the_authors() -> None:
    head = build_projector(ProjectorConfig(), feature_dim=32)
    assert [type(layer) for layer in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    shapes = [tuple(value.shape) for value in head.parameters()]
    assert shapes == [(512, 32), (512,), (512,), (512,), (128, 512)]  # the last layer without bias
    assert head(torch.randn(4, 32)).shape == (4, 128)


BASIS, SAME = torch.eye(6, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)
POLES = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (3 * BASIS, BASIS, (0, -4, 1)),  # perfect and orthogonal: every squared distance is 2; lengths do not matter
        (SAME, SAME, (0, 0, 5)),  # collapsed: the rank of chance
        # Each positive is the antipode, as is the negative of the same view, which ties with it; the other view's
        # negative lies on the anchor.
        (POLES, -POLES, (4, -8, 2.5)),
    ],
)
def test_health_in_closed_form(first: Tensor, second: Tensor, expected: tuple[float, float, float]) -> None:
    assert [figure.item() for figure in health(torch.stack([first, second]))] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("samples", "dim"), [(7, 8), (7, 2048), (50, 512), (511, 128)])
def test_collapse_gives_the_rank_of_chance(dtype: torch.dtype, samples: int, dim: int) -> None:
    """Though products of equal vectors differ by rounding."""
    one = torch.randn(dim, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert health(one.expand(2, samples, dim)).positive_rank.item() == pytest.approx(samples)


@pytest.mark.parametrize("elements", [1, 20, 2**24])  # strips of one, two and all rows
def test_health_equals_loops(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peclr_dali.models.network.TILE_ELEMENTS", elements)
    embeddings = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    unit = F.normalize(embeddings, dim=2)
    z = [*unit[0], *unit[1]]
    alignment = sum(float((a - b).square().sum()) for a, b in zip(*unit, strict=True)) / 5
    uniformity = 0.0
    for view in unit:
        pairs = [math.exp(-2 * float((view[i] - view[j]).square().sum())) for i in range(5) for j in range(i)]
        uniformity += math.log(sum(pairs) / len(pairs)) / 2
    ranks = []
    for i in range(10):
        positive = float(z[i] @ z[(i + 5) % 10])
        ranks.append(1 + sum(float(z[i] @ z[k]) > positive for k in range(10) if k not in (i, (i + 5) % 10)))
    figures = health(embeddings)
    assert figures.alignment.item() == pytest.approx(alignment, abs=1e-12)
    assert figures.uniformity.item() == pytest.approx(uniformity, abs=1e-12)
    assert figures.positive_rank.item() == pytest.approx(sum(ranks) / 10)

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.models.network import health

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
def test_closed_forms(first: Tensor, second: Tensor, expected: tuple[float, float, float]) -> None:
    figures = health(torch.stack([first, second]))
    assert [figure.item() for figure in figures] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("samples", "dim"), [(7, 8), (7, 2048), (50, 512), (511, 128)])
def test_collapse_gives_the_rank_of_chance(dtype: torch.dtype, samples: int, dim: int) -> None:
    """Though products of equal vectors differ by rounding."""
    one = torch.randn(dim, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert health(one.expand(2, samples, dim)).positive_rank.item() == pytest.approx(samples)


@pytest.mark.parametrize("elements", [1, 20, 2**24])  # strips of one, two and all rows
def test_equals_loops(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
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

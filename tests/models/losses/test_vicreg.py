"""VICReg in closed form, and against its equations written a second time."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from peclr_dali.models.losses.vicreg import VICReg


def views(samples: int, dim: int, seed: int = 0) -> Tensor:
    """Random, with deviations on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 2.0, dim, dtype=torch.float64)
    return torch.randn(2, samples, dim, generator=generator, dtype=torch.float64) * spread + 3


def oracle(embeddings: npt.NDArray[np.float64], loss: VICReg) -> float:
    """Eq. 1 to 6, number by number."""
    _, samples, dim = embeddings.shape
    total = 0.0
    for view in embeddings:
        mean = [math.fsum(view[:, j]) / samples for j in range(dim)]
        for i in range(dim):
            for j in range(dim):
                products = ((z[i] - mean[i]) * (z[j] - mean[j]) for z in view)
                covariance = math.fsum(products) / (samples - 1)
                if i == j:
                    lacking = max(0.0, loss.gamma - math.sqrt(covariance + loss.eps))
                    total += loss.variance * lacking / dim
                else:
                    total += loss.covariance * covariance**2 / dim
    distances = (math.dist(first, second) ** 2 for first, second in zip(*embeddings, strict=True))
    total += loss.invariance * math.fsum(distances) / samples
    return float(total)


WEIGHTS = VICReg(invariance=3, variance=5, covariance=0.7, gamma=1.2, eps=0.01)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 7), st.integers(1, 5), st.integers(0, 1000), st.sampled_from([VICReg(), WEIGHTS]))
def test_equals_the_equations(samples: int, dim: int, seed: int, loss: VICReg) -> None:
    embeddings = views(samples, dim, seed)
    assert loss(embeddings).item() == pytest.approx(oracle(embeddings.numpy(), loss), rel=1e-12)


def test_the_defaults_are_the_papers() -> None:
    loss = VICReg()
    assert (loss.invariance, loss.variance, loss.covariance, loss.gamma, loss.eps) == (25, 25, 1, 1, 1e-4)


def test_constant_embeddings_lack_all_variance() -> None:
    parts = VICReg().parts(torch.full((2, 5, 3), 7.0, dtype=torch.float64))
    assert {name: part.item() for name, part in parts.items()} == {
        "invariance": 0,
        "variance": pytest.approx(2 * (1 - 0.01), rel=1e-14),
        "covariance": 0,
    }


def test_the_loss_of_whitened_embeddings_is_the_difference_of_their_views() -> None:
    """Columns of a Hadamard matrix but the first: mean 0, orthogonal, variance 8/7."""
    white = torch.from_numpy(hadamard(8)[:, 1:6].astype(np.float64))
    assert VICReg()(white.expand(2, 8, 5)).item() == 0
    shifted = torch.stack([white, white + torch.tensor([3.0, 0, 0, 4, 0])])  # by a vector of length 5
    assert VICReg()(shifted).item() == 25 * 25
    narrow = VICReg().parts(white.expand(2, 8, 5) * math.sqrt(7 / 8) / 2)  # variance 1/4
    assert narrow["variance"].item() == pytest.approx(2 * (1 - math.sqrt(0.25 + 1e-4)), rel=1e-14)
    assert narrow["covariance"].item() == pytest.approx(0, abs=1e-30)


def test_a_known_covariance() -> None:
    """Coordinates (2x, 3x, y) of orthogonal x and y with variance 1: only the first two covary, by 6."""
    x, y = hadamard(8)[:, 1:3].T * math.sqrt(7 / 8)
    view = torch.from_numpy(np.stack([2 * x, 3 * x, y], axis=1))
    parts = VICReg().parts(view.expand(2, 8, 3))
    assert parts["covariance"].item() == pytest.approx(2 * (6**2 + 6**2) / 3, rel=1e-14)
    assert parts["variance"].item() == 0


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 1000))
def test_invariances(samples: int, dim: int, seed: int) -> None:
    embeddings = views(samples, dim, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    shift = torch.randn(dim, generator=generator, dtype=torch.float64)
    loss = VICReg()(embeddings)
    order, columns = (torch.randperm(count, generator=generator) for count in (samples, dim))
    for same in (embeddings.flip(0), embeddings[:, order], embeddings[:, :, columns], embeddings + shift, -embeddings):
        torch.testing.assert_close(VICReg()(same), loss, atol=1e-11, rtol=1e-11)


def test_gradient() -> None:
    assert torch.autograd.gradcheck(WEIGHTS, (views(4, 3).requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_computed_in_float32_under_autocast(dtype: torch.dtype) -> None:
    embeddings = views(16, 8).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = VICReg()(embeddings)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(oracle(embeddings.double().numpy(), VICReg()), rel=2e-6)


def test_wrong_shapes_are_named() -> None:
    for shape in ((3, 4, 5), (2, 1, 5), (2, 4, 0)):
        with pytest.raises(ValueError, match=rf"{re.escape(str(shape))}, expected \(2, N, D\)"):
            VICReg()(torch.zeros(shape))

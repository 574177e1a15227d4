"""`Lars` against the formulas of apex's LARC and lightly's LARS, written as loops in float64.

apex/parallel/LARC.py as of the commit before cb65b8ed, which removed it; lightly/utils/lars.py of e8d317fc.
docs/fidelity.md has the table of what differs; a test here asserts each difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.plain_loops import SHAPES, step_together, tensors
from train import Lars

LR, TRUST, EPS = 0.05, 0.02, 1e-8
Scale = Callable[[list[float], list[float], float], list[float]]


def norm(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers))


def larc(clip: bool) -> Scale:
    """The gradient as LARC leaves it for the inner optimiser, whose weight decay is 0 meanwhile."""

    def scale(w: list[float], g: list[float], decay: float) -> list[float]:
        if norm(w) == 0 or norm(g) == 0:
            return g
        adaptive_lr = TRUST * norm(w) / (norm(g) + norm(w) * decay + EPS)
        if clip:
            adaptive_lr = min(adaptive_lr / LR, 1)
        return [(gi + decay * wi) * adaptive_lr for gi, wi in zip(g, w, strict=True)]

    return scale


def lightly(w: list[float], g: list[float], decay: float) -> list[float]:
    """What lightly's momentum takes in: nothing is scaled where there is no weight decay, and there is no clipping."""
    if decay == 0 or norm(w) == 0 or norm(g) == 0:
        return g
    lars_lr = norm(w) / (norm(g) + norm(w) * decay + EPS) * TRUST
    return [(gi + decay * wi) * lars_lr for gi, wi in zip(g, w, strict=True)]


class Sgd:
    """torch's SGD, and lightly's own, behind a scaled gradient."""

    def __init__(
        self, weights: list[Tensor], scale: Scale, decay: float, momentum: float, dampening: float, nesterov: bool
    ) -> None:
        self.weights = [weight.flatten().tolist() for weight in weights]
        self.velocity: list[list[float]] = [[] for _ in weights]
        self.scale, self.decay = scale, decay
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov

    def step(self, gradients: list[Tensor]) -> None:
        for k, gradient in enumerate(gradients):
            w, mu = self.weights[k], self.momentum
            g = self.scale(w, gradient.flatten().tolist(), self.decay)
            if mu:
                old = self.velocity[k]
                v = [mu * vi + (1 - self.dampening) * gi for vi, gi in zip(old, g, strict=True)] if old else g
                self.velocity[k] = v
                g = [gi + mu * vi for gi, vi in zip(g, v, strict=True)] if self.nesterov else v
            self.weights[k] = [wi - LR * gi for wi, gi in zip(w, g, strict=True)]


def difference(oracle: Sgd, decay: float, clip: bool, zero: str = "none", **sgd: Any) -> float:
    """Largest difference of a weight after four steps of ours and of the oracle."""
    starts = zip(oracle.weights, SHAPES, strict=True)
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float64).view(shape)) for w, shape in starts]
    lars = Lars(torch.optim.SGD(parameters, lr=LR, weight_decay=decay, **sgd), TRUST, clip, EPS)
    scales = (2.0, 0.05, 2.0, 2.0)  # the clip acts at the second step
    step_together(lars, oracle, parameters, scales, zero)
    ends = zip(parameters, oracle.weights, strict=True)
    return max(float((p.detach().flatten() - torch.tensor(w, dtype=torch.float64)).abs().max()) for p, w in ends)


def beginning(zero: str) -> list[Tensor]:
    weights = tensors(0)
    if zero == "weight":
        weights[1].zero_()
    return weights


MOMENTA: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]


def sgd_of(scale: Scale, decay: float, zero: str, momentum: dict[str, Any]) -> Sgd:
    options = {"dampening": 0.0, "nesterov": False, **momentum}
    return Sgd(beginning(zero), scale, decay, **options)


@pytest.mark.parametrize("momentum", MOMENTA, ids=str)
@pytest.mark.parametrize("zero", ["none", "weight", "gradient"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("clip", [True, False])
def test_equals_apex(clip: bool, decay: float, zero: str, momentum: dict[str, Any]) -> None:
    assert difference(sgd_of(larc(clip), decay, zero, momentum), decay, clip, zero, **momentum) < 1e-13


@pytest.mark.parametrize("momentum", MOMENTA, ids=str)
@pytest.mark.parametrize("zero", ["none", "weight", "gradient"])
def test_equals_lightly_where_there_is_weight_decay(zero: str, momentum: dict[str, Any]) -> None:
    """Without clipping, which lightly lacks."""
    assert difference(sgd_of(lightly, 0.3, zero, momentum), 0.3, clip=False, zero=zero, **momentum) < 1e-13


def gradient_after(lars: Lars, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    parameter.grad = gradient.clone()
    lars.step()
    assert parameter.grad is not None
    return parameter.grad


def test_differs_from_lightly_without_weight_decay() -> None:
    """There lightly leaves the gradient alone; here and in apex it is scaled."""
    weight, gradient = tensors(0)[0], tensors(1)[0]
    parameter = nn.Parameter(weight.clone())
    scaled = gradient_after(Lars(torch.optim.SGD([parameter], lr=LR), TRUST, clip=False), parameter, gradient)
    torch.testing.assert_close(scaled, gradient * TRUST * weight.norm() / (gradient.norm() + EPS))
    assert lightly(weight.flatten().tolist(), gradient.flatten().tolist(), 0.0) == gradient.flatten().tolist()


def test_differs_from_lightly_in_the_clip() -> None:
    """A small gradient: lightly makes it larger, the clip leaves it as it is."""
    weight, gradient = tensors(0)[0], tensors(1, 1e-3)[0]
    parameter = nn.Parameter(weight.clone())
    inner = torch.optim.SGD([parameter], lr=LR, weight_decay=1e-6)
    clipped = gradient_after(Lars(inner, TRUST), parameter, gradient)
    torch.testing.assert_close(clipped, gradient + 1e-6 * weight, atol=0, rtol=1e-12)
    theirs = lightly(weight.flatten().tolist(), gradient.flatten().tolist(), 1e-6)
    assert norm(theirs) > 10 * float(clipped.norm())


def test_weight_decay_of_adamw_is_inside_the_factor() -> None:
    """As in apex: AdamW gets the decay with the gradient, and none of its own."""
    weight, gradient = tensors(0)[0], tensors(1)[0]
    ours, plain = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    lars = Lars(torch.optim.AdamW([ours], lr=LR, weight_decay=0.3), TRUST)
    scaled = torch.tensor(larc(True)(weight.flatten().tolist(), gradient.flatten().tolist(), 0.3)).view_as(weight)
    torch.testing.assert_close(gradient_after(lars, ours, gradient), scaled.double(), atol=1e-7, rtol=1e-6)
    plain.grad = ours.grad
    torch.optim.AdamW([plain], lr=LR, weight_decay=0.0).step()
    assert torch.equal(ours, plain)
    assert lars.param_groups[0]["weight_decay"] == 0.3


def test_around_an_optimiser_without_weight_decay() -> None:
    parameter = nn.Parameter(tensors(0)[0])
    lars = Lars(torch.optim.Rprop([parameter], lr=LR))
    scaled = gradient_after(lars, parameter, tensors(1)[0])
    trust = TRUST * float(tensors(0)[0].norm() / tensors(1)[0].norm())
    torch.testing.assert_close(scaled, min(trust / LR, 1) * tensors(1)[0])
    assert "weight_decay" not in lars.param_groups[0]

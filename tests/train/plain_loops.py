"""What the tests of `Lars` against formulas in plain loops share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from train.steps.optim import Lars

SHAPES = [(4, 3), (5,), (2, 3, 3, 3), (1,)]


class Oracle(Protocol):
    """An optimiser written as loops over numbers."""

    weights: list[list[float]]

    def step(self, gradients: list[Tensor]) -> None: ...


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def step_together(
    lars: Lars, oracle: Oracle, parameters: Sequence[nn.Parameter], scales: Sequence[float], zero: str
) -> None:
    """Steps of both with the same gradients, one for each scale; the third gradient is zero where `zero` says so."""
    for step, scale in enumerate(scales):
        gradients = tensors(10 + step, scale)
        if zero == "gradient":
            gradients[2].zero_()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        lars.step()
        oracle.step(gradients)

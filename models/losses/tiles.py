"""The cross entropy of NT-Xent and its gradient, a strip of the similarity matrix at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class TiledCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of some anchors. Only the gradient is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, rows: range, temperature: float, tile_elements: int) -> Tensor:
        """The summed cross entropy, a scalar, of unit vectors (2N, D). The anchors are `rows` of both views."""
        total, gradient = _in_tiles(unit, rows, temperature, tile_elements, with_gradient=ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        """The kept gradient times the outer one."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None, None


def _in_tiles(
    unit: Tensor, rows: range, temperature: float, tile_elements: int, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed cross entropy of some anchors' rows of the similarity matrix, and its gradient, a strip of rows at a time.

    A row of the softmax needs no other row. So one pass gives the loss and its gradient, and the memory of a strip is
    free again before the next strip.
    """
    columns = len(unit)
    samples = columns // 2
    strip = max(1, tile_elements // columns)
    gradient = torch.zeros_like(unit) if with_gradient else None
    total = unit.new_zeros(())
    tile = unit.new_empty(min(strip, len(rows)), columns)  # one for all strips: a new one each would make it two
    for anchor, positive in ((0, samples), (samples, 0)):  # where the anchors' view begins, and the other one
        for first in range(rows.start, rows.stop, strip):
            anchors = unit[anchor + first : anchor + min(first + strip, rows.stop)]  # (s, D)
            weight = tile[: len(anchors)]  # (s, 2N): first the logits, in the end their softmax
            torch.mm(anchors / temperature, unit.T, out=weight)
            weight.diagonal(anchor + first).fill_(float("-inf"))  # itself
            of_positive = weight.diagonal(positive + first)
            highest = weight.amax(dim=1)
            total += (highest - of_positive).sum()
            weight.sub_(highest[:, None]).exp_()
            normaliser = weight.sum(dim=1)
            total += normaliser.log().sum()
            if gradient is not None:
                weight.div_(normaliser[:, None])
                of_positive.sub_(1)
                gradient[anchor + first : anchor + first + len(anchors)].addmm_(weight, unit)
                gradient.addmm_(weight.T, anchors)
    return total, None if gradient is None else gradient.div_(temperature)

"""The cross entropy of NT-Xent and its gradient, a strip of the similarity matrix at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from peclr_dali.models.losses.tensors import require_pairs


def cross_entropy(embeddings: Tensor, rows: range, temperature: float, tile_elements: int) -> Tensor:
    """The contribution of some samples' anchors to the mean over all 2N anchors; see `AnchorLoss.share`.

    At most `tile_elements` similarities are in memory at once.

    Raises:
        TypeError: the embeddings are no tensor of floats.
        ValueError: the embeddings are not (2, N, D), or `rows` is no part of 0..N-1.
    """
    require_pairs(embeddings)
    _, samples, dim = embeddings.shape
    if not isinstance(rows, range) or rows != range(samples)[rows.start : rows.stop]:
        raise ValueError(f"rows = {rows!r}: expected consecutive samples within {range(samples)}")
    with torch.autocast(embeddings.device.type, enabled=False):
        exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        unit = F.normalize(exact, dim=2).view(-1, dim)  # (2N, D)
        total: Tensor = _TiledCrossEntropy.apply(  # type: ignore[no-untyped-call]
            unit, rows, temperature, tile_elements
        )
        return total / (2 * samples)


class _TiledCrossEntropy(torch.autograd.Function):
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
            of_positive = weight.diagonal(positive + first)
            weight.diagonal(anchor + first).fill_(float("-inf"))  # itself
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

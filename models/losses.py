"""The contrastive loss."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bounds import Positive


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LossConfig:
    """Settings of NT-Xent.

    Attributes:
        temperature: divides the cosine; the authors' value, the paper gives none.
    """

    temperature: Positive = 0.5


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Normalised temperature-scaled cross entropy over N positive pairs (SimCLR; PeCLR, eq. 1 and 3).

    Each of the 2N embeddings is an anchor: its pair is the positive, the other 2N - 2 are negatives. Similarity is the
    cosine, so lengths do not matter. Computed in log space in float32, also under autocast; float64 stays float64.

    Args:
        first: (N, D), one view of each sample.
        second: (N, D), the other view, in the same order.
        temperature: divides the cosine; the authors' value is 0.5.

    Returns:
        Scalar, the mean over the 2N anchors: ln(2N - 1) if all embeddings are equal.

    Raises:
        ValueError: the shapes differ or are not (N, D).

    Example:
        >>> nt_xent(torch.eye(4), torch.eye(4))  # aligned and orthogonal: ln(1 + 6 exp(-2))
        tensor(0.5944)
    """
    if first.ndim != 2 or first.shape != second.shape:
        raise ValueError(f"views have shapes {tuple(first.shape)} and {tuple(second.shape)}, expected twice (N, D)")
    return nt_xent_rows(torch.stack([first, second]), range(len(first)), temperature)


def nt_xent_rows(embeddings: Tensor, rows: range, temperature: float = 0.5) -> Tensor:
    """The share of `nt_xent` that the anchors of some samples contribute, against the embeddings of all samples.

    The shares of ranges that partition 0..N-1 add up to `nt_xent`, and so do their gradients: with respect to all
    of `embeddings`, since every one of them stands in the denominator of every share. The similarity matrix is never
    in memory as a whole, only `TILE_ELEMENTS` of it; the gradient has no gradient of its own.

    Args:
        embeddings: (2, N, D), both views of all samples.
        rows: consecutive samples whose 2 * len(rows) embeddings are the anchors.
        temperature: see `nt_xent`.

    Returns:
        Scalar, the sum over these anchors, divided by the number 2N of all.
    """
    _, samples, dim = embeddings.shape
    with torch.autocast(embeddings.device.type, enabled=False):
        exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        unit = F.normalize(exact, dim=2).view(-1, dim)  # (2N, D)
        total: Tensor = _TiledCrossEntropy.apply(unit, rows, temperature)  # type: ignore[no-untyped-call]
        return total / (2 * samples)


TILE_ELEMENTS = 2**24
"""Similarities in memory at once: 64 MiB in float32. The whole matrix has (2n)(2N) of them."""


class _TiledCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of some anchors' rows of the similarity matrix, a strip of rows at a time.

    A row of softmax needs no other row, so that one pass gives both the loss and its gradient, and nothing of a strip
    is kept: neither for backward nor until the next one.
    """

    @staticmethod
    def forward(ctx: Any, unit: Tensor, rows: range, temperature: float) -> Tensor:
        columns = len(unit)
        samples = columns // 2
        strip = max(1, TILE_ELEMENTS // columns)
        gradient = torch.zeros_like(unit) if ctx.needs_input_grad[0] else None
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
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(temperature))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None

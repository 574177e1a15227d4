"""NT-Xent, the contrastive loss of SimCLR and PeCLR."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from bounds import Positive
from models.losses.loss import AnchorLoss, require_pairs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TILE_ELEMENTS = 2**24
"""Largest number of similarities in memory at once: 64 MiB in float32. The whole matrix has (2n)(2N) of them."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NTXent(AnchorLoss):
    """Normalised temperature-scaled cross entropy over N positive pairs (SimCLR; PeCLR, eq. 1 and 3).

    Each of the 2N embeddings is an anchor: its pair is the positive, the other 2N - 2 are negatives. Similarity is the
    cosine, so lengths do not matter. Computed in log space in float32, also under autocast; float64 stays float64. The
    similarity matrix is never in memory as a whole, only `TILE_ELEMENTS` of it. Second derivatives are not
    supported.

    Attributes:
        name: "nt_xent".
        temperature: divides the cosine; the authors' value, the paper gives none.

    Example:
        >>> NTXent()(torch.eye(4).expand(2, 4, 4))  # aligned and orthogonal: ln(1 + 6 exp(-2))
        tensor(0.5944)
    """

    name: Literal["nt_xent"] = "nt_xent"
    temperature: Positive = 0.5

    title: ClassVar[str] = "NT-Xent loss"

    def share(self, embeddings: Tensor, rows: range) -> Tensor:
        """The contribution of some samples' anchors to the mean over all 2N anchors; see `AnchorLoss.share`.

        Raises:
            ValueError: the embeddings are not (2, N, D).
        """
        import torch
        from torch.nn import functional as F

        require_pairs(embeddings)
        _, samples, dim = embeddings.shape
        with torch.autocast(embeddings.device.type, enabled=False):
            exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            unit = F.normalize(exact, dim=2).view(-1, dim)  # (2N, D)
            total: Tensor = _cross_entropy().apply(unit, rows, self.temperature)  # type: ignore[no-untyped-call]
            return total / (2 * samples)

    def chance(self, samples: int) -> tuple[float, str]:
        """ln(2N - 1), the loss if all similarities are equal."""
        others = 2 * samples - 1
        return math.log(others), f"ln {others}"


@cache  # torch is not imported before the first call
def _cross_entropy() -> type[torch.autograd.Function]:
    """Summed cross entropy of some anchors. Only the gradient is kept for the backward pass."""
    import torch
    from torch.autograd.function import once_differentiable

    class TiledCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, unit: Tensor, rows: range, temperature: float) -> Tensor:
            total, gradient = _in_tiles(unit, rows, temperature, with_gradient=ctx.needs_input_grad[0])
            if gradient is not None:
                ctx.save_for_backward(gradient)
            return total

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
            (gradient,) = ctx.saved_tensors
            return gradient * outer, None, None

    return TiledCrossEntropy


def _in_tiles(unit: Tensor, rows: range, temperature: float, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Summed cross entropy of some anchors' rows of the similarity matrix, and its gradient, a strip of rows at a time.

    A row of the softmax needs no other row. So one pass gives the loss and its gradient, and the memory of a strip is
    free again before the next strip.
    """
    import torch

    columns = len(unit)
    samples = columns // 2
    strip = max(1, TILE_ELEMENTS // columns)
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

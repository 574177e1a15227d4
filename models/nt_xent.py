"""NT-Xent, the contrastive loss of SimCLR and PeCLR, a strip of the similarity matrix at a time; and its base class."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.bounds import Positive
from peclr_dali.models.tensor_checks import require_floats

TILE_ELEMENTS = 2**24
"""Largest number of similarities in memory at once: 64 MiB in float32. The whole matrix has (2n)(2N) of them."""


class AnchorLoss(ABC):
    """A loss that is a sum over anchors, each against all embeddings.

    Every rank takes the anchors of its own samples, and the gradients are summed over ranks. Any other loss is a
    function of all embeddings, and is computed completely on every rank.
    """

    @abstractmethod
    def share(self, embeddings: Tensor, rows: range) -> Tensor:
        """The contribution of some samples' anchors to the loss.

        Args:
            embeddings: (V, N, D), of all samples.
            rows: consecutive samples whose embeddings are the anchors.

        Returns:
            Scalar with graph to all of `embeddings`. The shares of ranges that partition 0..N-1 add up to the loss.
        """

    def __call__(self, embeddings: Tensor, *inputs: Tensor) -> Tensor:
        """The sum over all anchors; further `inputs` of `ExactStep` are passed on to `share`."""
        require_floats("embeddings", embeddings, ("V", "N", "D"))
        return self.share(embeddings, range(embeddings.shape[1]), *inputs)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NTXent(AnchorLoss):
    """Normalised temperature-scaled cross entropy over N positive pairs (SimCLR; PeCLR, eq. 1 and 3).

    Each of the 2N embeddings is an anchor: its pair is the positive, the other 2N - 2 are negatives. Similarity is the
    cosine, so lengths between 1e-12 and 1e18 do not matter. Computed in log space in float32, also under autocast;
    float64 stays float64. The similarity matrix is never in memory as a whole, only `TILE_ELEMENTS` of it. There are no
    second derivatives: `create_graph=True` is a NotImplementedError.

    Attributes:
        temperature: divides the cosine. The default is the authors' value; the paper gives none.
    """

    temperature: Positive = 0.5

    def share(self, embeddings: Tensor, rows: range) -> Tensor:
        """The contribution of some samples' anchors to the mean over all 2N anchors; see `AnchorLoss.share`.

        Raises:
            TypeError: the embeddings are no tensor of floats.
            ValueError: the embeddings are not (2, N, D) with N > 1, or `rows` is no part of 0..N-1.
        """
        require_floats("embeddings", embeddings, (2, "N", "D"))
        _, samples, dim = embeddings.shape
        if samples < 2 or rows != range(samples)[rows.start : rows.stop]:  # one sample has no negatives
            raise ValueError(f"rows = {rows!r} of {samples} samples: expected consecutive ones of two samples or more")
        with torch.autocast(embeddings.device.type, enabled=False):
            exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            unit = F.normalize(exact, dim=2).reshape(-1, dim)  # (2N, D)
            total: Tensor = _TiledCrossEntropy.apply(unit, rows, self.temperature)  # type: ignore[no-untyped-call]
            return total / (2 * samples)


def loss_at_chance(samples: int) -> tuple[float, str]:
    """ln(2N - 1), the loss of N = `samples` samples if all similarities are equal, and its formula."""
    others = 2 * samples - 1
    return math.log(others), f"ln {others}"


class _TiledCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of some anchors' rows of the similarity matrix, and its gradient, a strip of rows at a time.

    A row of the softmax needs no other row. So one pass gives the loss and its gradient, and the memory of a strip is
    free again before the next strip. Only the gradient is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, unit: Tensor, rows: range, temperature: float) -> Tensor:
        """The summed cross entropy, a scalar, of unit vectors (2N, D). The anchors are `rows` of both views."""
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
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(temperature))
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """The kept gradient times the outer one."""
        if torch.is_grad_enabled():  # a constant in its place would give wrong second derivatives
            raise NotImplementedError("NTXent has no second derivatives: leave create_graph=True out")
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None

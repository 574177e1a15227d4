"""NT-Xent, the contrastive loss of SimCLR and PeCLR, and its base class, whose work the ranks share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import Positive

if TYPE_CHECKING:
    from torch import Tensor

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
        from peclr_dali.models.losses.tensors import require_floats

        require_floats("embeddings", embeddings, ("V", "N", "D"))
        return self.share(embeddings, range(embeddings.shape[1]), *inputs)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NTXent(AnchorLoss):
    """Normalised temperature-scaled cross entropy over N positive pairs (SimCLR; PeCLR, eq. 1 and 3).

    Each of the 2N embeddings is an anchor: its pair is the positive, the other 2N - 2 are negatives. Similarity is the
    cosine, so lengths do not matter. Computed in log space in float32, also under autocast; float64 stays float64. The
    similarity matrix is never in memory as a whole, only `TILE_ELEMENTS` of it. Second derivatives are not
    supported.

    Attributes:
        temperature: divides the cosine. The default is the authors' value; the paper gives none.

    Example:
        >>> NTXent()(torch.eye(4).expand(2, 4, 4))  # aligned and orthogonal: ln(1 + 6 exp(-2))
        tensor(0.5944)
    """

    temperature: Positive = 0.5

    def share(self, embeddings: Tensor, rows: range) -> Tensor:
        """The contribution of some samples' anchors to the mean over all 2N anchors; see `tiles.cross_entropy`."""
        from peclr_dali.models.losses.tiles import cross_entropy

        return cross_entropy(embeddings, rows, self.temperature, TILE_ELEMENTS)


def loss_at_chance(samples: int) -> tuple[float, str]:
    """ln(2N - 1), the loss of N = `samples` samples if all similarities are equal, and its formula."""
    others = 2 * samples - 1
    return math.log(others), f"ln {others}"

"""NT-Xent, the contrastive loss of SimCLR and PeCLR."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import Positive
from peclr_dali.models.losses.loss import AnchorLoss

if TYPE_CHECKING:
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

"""The base class of a loss whose work the ranks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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

"""The base class of the losses of pre-training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Loss(ABC):
    """A loss of the embeddings of the whole batch.

    A subclass is a frozen pydantic dataclass. Its fields are the keys of the table [loss], `name` among them. A file of
    `peclr_dali.models.losses` imports torch inside functions only: a configuration is read before torch is imported.

    Attributes:
        title: title of the loss's curve.
    """

    title: ClassVar[str] = "loss"

    @abstractmethod
    def __call__(self, embeddings: Tensor) -> Tensor:
        """The loss of all samples.

        Args:
            embeddings: (V, N, D), every view of the N samples of the whole batch, after the latent inverse.

        Returns:
            Scalar with graph.
        """

    def parts(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Further figures for metrics.jsonl: scalars of the same embeddings. By default there are none.

        Their names differ from those of `peclr_dali.models.health.Health`.
        """
        return {}

    def chance(self, samples: int) -> tuple[float, str] | None:
        """The loss of N = `samples` samples whose embeddings are all equal, and its formula; None if not defined."""
        return None


class AnchorLoss(Loss):
    """A loss that is a sum over anchors, each against all embeddings.

    Every rank takes the anchors of its own samples, and the gradients are summed over ranks. Any other loss is computed
    completely on every rank.
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


def require_pairs(embeddings: Tensor, *, least: int = 1) -> None:
    """Check that the embeddings are (2, N, D) with N at least `least`. Errors as `tensors.require_floats`."""
    from peclr_dali.models.losses.tensors import require_floats

    require_floats("embeddings", embeddings, (2, "N", "D"))
    if embeddings.shape[1] < least:
        raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}, expected (2, N, D) with N at least {least}")

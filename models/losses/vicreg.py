"""VICReg: variance, invariance and covariance (Bardes, Ponce and LeCun 2022, arXiv 2105.04906)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import NotNegative, Positive
from peclr_dali.models.losses.loss import Loss, require_pairs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class VICReg(Loss):
    """The weighted sum of three terms (eq. 6), of both views (2, N, D) of N >= 2 samples.

    Statistics are over the whole batch. Computed in float32, also under autocast; float64 stays float64.

    Attributes:
        name: "vicreg".
        invariance: weight of the mean squared distance of the two views of a sample (eq. 5).
        variance: weight of max(0, `gamma` - deviation of a coordinate) (eq. 1 and 2), a mean over coordinates.
        covariance: weight of the squared covariances of different coordinates (eq. 3 and 4), their sum over D.
        gamma: the deviation that every coordinate should have.
        eps: added to the variance before its root.

    Example:
        >>> VICReg()(torch.ones(2, 8, 4))  # collapsed: 25 * 2 * (1 - sqrt(1e-4))
        tensor(49.5000)
    """

    name: Literal["vicreg"] = "vicreg"
    invariance: NotNegative = 25.0
    variance: NotNegative = 25.0
    covariance: NotNegative = 1.0
    gamma: Positive = 1.0
    eps: Positive = 1e-4

    title: ClassVar[str] = "VICReg loss"

    def __call__(self, embeddings: Tensor) -> Tensor:
        """The loss; errors as `parts`."""
        parts = self.parts(embeddings)
        weighted = self.invariance * parts["invariance"] + self.variance * parts["variance"]
        return weighted + self.covariance * parts["covariance"]

    def parts(self, embeddings: Tensor) -> dict[str, Tensor]:
        """The three terms before weighting; the last two are summed over the views.

        Raises:
            TypeError: the embeddings are no tensor of floats.
            ValueError: the embeddings are not (2, N, D) with N at least 2.
        """
        import torch

        require_pairs(embeddings, least=2)
        _, samples, dim = embeddings.shape
        with torch.autocast(embeddings.device.type, enabled=False):
            exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            centred = exact - exact.mean(dim=1, keepdim=True)
            covariance = centred.mT @ centred / (samples - 1)  # (2, D, D)
            variances = covariance.diagonal(dim1=1, dim2=2)  # (2, D)
            return {
                "invariance": (exact[0] - exact[1]).square().sum(dim=1).mean(),
                "variance": (self.gamma - (variances + self.eps).sqrt()).relu().sum() / dim,
                "covariance": (covariance - variances.diag_embed()).square().sum() / dim,
            }

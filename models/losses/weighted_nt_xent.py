"""NT-Xent whose cosines are weighted by distances of keypoints: the loss of SiMHand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import Positive
from peclr_dali.models.losses.loss import AnchorLoss, require_pairs

if TYPE_CHECKING:
    from torch import Tensor

TILE_ELEMENTS = 2**22
"""Largest number of similarities in memory at once: 16 MiB in float32. Their weights take three times as much."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class WeightedNTXent(AnchorLoss):
    """NT-Xent whose cosines are multiplied by constant weights (SiMHand, arXiv 2502.15251, as in the authors' code).

    The distance d of two views is the mean Euclidean distance of their keypoints, each in pixels of its own view. The
    nearer two hands are, the larger the weight of their cosine:

    - "linear": (max d - d) / (max d - min d).
    - "sigmoid": 1 / (1 + exp(steepness (d - mean d))).

    In the numerator, d and its statistics are those of the N positive pairs. In the denominator, which has all other
    views, the positive too, the statistics are over all 2N x 2N pairs of views, each with itself (distance 0) included.
    Otherwise as `NTXent`. No gradient goes through the weights.

    Attributes:
        name: "weighted_nt_xent".
        temperature: divides the weighted cosine.
        weights: "linear" or "sigmoid". If all distances are equal, linear weights are 1.
        weighted: the cosines that are weighted: in the numerator ("positives"), the denominator ("negatives"), "both".
        steepness_positives: "sigmoid": in the numerator, per pixel.
        steepness_negatives: "sigmoid": in the denominator, per pixel.
    """

    name: Literal["weighted_nt_xent"] = "weighted_nt_xent"
    temperature: Positive = 0.5
    weights: Literal["linear", "sigmoid"] = "linear"
    weighted: Literal["both", "positives", "negatives"] = "both"
    steepness_positives: Positive = 1.0
    steepness_negatives: Positive = 0.01

    title: ClassVar[str] = "weighted NT-Xent loss"
    needs_keypoints: ClassVar[bool] = True

    def share(self, embeddings: Tensor, rows: range, keypoints_px: Tensor | None = None) -> Tensor:
        """The contribution of some samples' anchors to the mean over all 2N anchors; see `AnchorLoss.share`.

        Args:
            keypoints_px: (2, N, K, 2), of all samples in both views, finite.

        Raises:
            TypeError: the embeddings or keypoints are no tensor of floats.
            ValueError: they have another shape or are on different devices, or `rows` is no part of 0..N-1.
        """
        import torch

        from peclr_dali.models.losses.keypoint_distances import KeypointDistances
        from peclr_dali.models.losses.tensors import require_floats
        from peclr_dali.models.losses.tiles import Weights, cross_entropy

        require_pairs(embeddings)
        require_floats("keypoints_px", keypoints_px, (2, embeddings.shape[1], "K", 2), like=embeddings)
        assert keypoints_px is not None
        with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
            exact = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
            distances = KeypointDistances(keypoints_px.to(exact), TILE_ELEMENTS)
            of_positives = of_rows = None
            if self.weighted != "negatives":
                d = distances.of_positives()
                of_positives = self._weigh(d, d.amin(), d.amax(), d.mean(), self.steepness_positives)
            if self.weighted != "positives":
                largest, mean = distances.largest_and_mean()

                def of_rows(start: int, stop: int) -> Tensor:
                    zero = torch.zeros_like(largest)
                    return self._weigh(distances.of_rows(start, stop), zero, largest, mean, self.steepness_negatives)

        return cross_entropy(embeddings, rows, self.temperature, TILE_ELEMENTS, Weights(of_positives, of_rows))

    def _weigh(self, d: Tensor, smallest: Tensor, largest: Tensor, mean: Tensor, steepness: float) -> Tensor:
        """The weights of distances d, in the memory of d."""
        if self.weights == "sigmoid":
            return d.sub_(mean).mul_(-steepness).sigmoid_()
        width = largest - smallest
        return d.sub_(largest).neg_().div_(width).masked_fill_(width == 0, 1)

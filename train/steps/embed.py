"""What `ExactStep` takes from a batch with two views of each sample: embeddings, and keypoints for the loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peclr_dali.models.tensor_checks import require_floats
from peclr_dali.pipelines.batch import Batch


@dataclass(frozen=True, eq=False)
class ViewEmbedder:
    """Embeds both views of some samples by a network and the latent inverse. It is an `ExactStep.embed`.

    Attributes:
        network: (2n, 3, S, S) uint8 to (2n, D) projections.
        undo: projections, matrices (2n, 2, 3) and source_to_view_px (2n, 2, 3) to embeddings (2n, D), as
            `peclr_dali.models.equivariance.build_undo` makes it.
        autocast_dtype: 16-bit type for the network; None: no autocast. The latent inverse has at least 32 bits.
    """

    network: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor, Tensor, Tensor], Tensor]
    autocast_dtype: torch.dtype | None = None

    def __call__(self, batch: Batch, rows: slice) -> Tensor:
        """The embeddings (2, n, D) with graph of the first two views of n samples, given their rows in the batch.

        Raises:
            TypeError: the network gives something else than a tensor of floats.
            ValueError: the batch has one view, or the network gives another shape.
        """
        first, second = batch.views[:2]
        image = torch.cat([first.image[rows], second.image[rows]])
        matrix = torch.cat([first.matrix[rows], second.matrix[rows]])
        source_to_view_px = torch.cat([first.source_to_view_px[rows], second.source_to_view_px[rows]])
        with torch.autocast(image.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            projection = self.network(image)
        require_floats("what the network gives", projection, (len(image), "D"))
        if projection.dtype != torch.float64:
            projection = projection.float()
        return self.undo(projection, matrix, source_to_view_px).view(2, -1, projection.shape[1])


def keypoints_of_pairs(batch: Batch) -> tuple[Tensor]:
    """The keypoints in the first two views, (2, n, K, 2), in pixels of each view. Use it as `ExactStep.loss_inputs`.

    Raises:
        UserError: the data has no keypoints.
    """
    return (torch.stack([batch.keypoints_px(view) for view in range(2)]),)

"""Figures that tell whether contrastive training is well: cheap enough for every log step, without gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Health:
    """Scalars on the device of the embeddings.

    Attributes:
        alignment: mean squared distance within positive pairs on the unit sphere; 0 is perfect, 2 is chance.
        uniformity: log of the mean of exp(-2 d^2) over the pairs of different samples of one view, d their distance on
            the unit sphere, averaged over both views; 0 is collapse, about -4 uniform in many dimensions.
        positive_rank: mean rank of the positive among the 2N - 1 others by cosine; 1 is best, N is chance
            and also what collapse gives, since ties take their middle rank.
    """

    alignment: Tensor
    uniformity: Tensor
    positive_rank: Tensor


@torch.no_grad()
def health(embeddings: Tensor) -> Health:
    """Alignment and uniformity (Wang and Isola 2020, section 4.1.2, alpha = t = 2) and the positives' mean rank.

    Args:
        embeddings: (2, N, D), both views of N >= 2 samples, of any length.

    Raises:
        ValueError: another shape.
    """
    if embeddings.ndim != 3 or embeddings.shape[0] != 2 or embeddings.shape[1] < 2:
        raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}, expected (2, N, D) with N at least 2")
    samples = embeddings.shape[1]
    with torch.autocast(embeddings.device.type, enabled=False):
        exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        unit = F.normalize(exact, dim=2)
        cosine = unit.flatten(0, 1) @ unit.flatten(0, 1).T  # (2N, 2N)

        alignment = (unit[0] - unit[1]).square().sum(dim=1).mean()

        diagonal = torch.eye(samples, dtype=torch.bool, device=unit.device)
        same_view = torch.stack([cosine[:samples, :samples], cosine[samples:, samples:]])  # (2, N, N)
        exponent = (4 * (same_view - 1)).masked_fill(diagonal, float("-inf"))  # -2 d^2, with d^2 = 2 - 2 cos
        uniformity = (exponent.flatten(1).logsumexp(dim=1) - math.log(samples * (samples - 1))).mean()

        positive = torch.cat([cosine.diagonal(samples), cosine.diagonal(-samples)])[:, None]  # (2N, 1)
        itself = torch.eye(2 * samples, dtype=torch.bool, device=unit.device)
        better = (cosine > positive).masked_fill(itself, False).sum(dim=1)  # (2N,)
        tied = (cosine == positive).masked_fill(itself, False).sum(dim=1) - 1  # without the positive
        positive_rank = (1 + better + tied / 2).to(unit.dtype).mean()
    return Health(alignment, uniformity, positive_rank)

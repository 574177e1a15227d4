"""Measures of the health of contrastive training, without gradient and cheap enough for every log step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.models.nt_xent import TILE_ELEMENTS, require_pairs


class Health(NamedTuple):
    """Scalars on the device of the embeddings.

    Attributes:
        alignment: mean squared distance within positive pairs on the unit sphere; 0 is perfect, 2 is chance.
        uniformity: log of the mean of exp(-2 d^2) over the pairs of different samples of one view, d their distance on
            the unit sphere, averaged over both views; 0 is collapse, about -4 uniform in many dimensions.
        positive_rank: mean rank of the positive among the 2N - 1 others by cosine; 1 is best, N is chance. Ties take
            their middle rank, so collapse also gives N.
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
    require_pairs(embeddings, least=2)
    samples = embeddings.shape[1]
    with torch.autocast(embeddings.device.type, enabled=False):
        exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        unit = F.normalize(exact, dim=2)
        alignment = (unit[0] - unit[1]).square().sum(dim=1).mean()

        tolerance = 32 * torch.finfo(unit.dtype).eps  # equal cosines differ by rounding, at most by about 8 eps
        strip = max(1, TILE_ELEMENTS // (2 * samples))  # rows of the similarity matrix in memory at once
        crowding: list[Tensor] = []  # of each embedding: log of the sum of exp(-2 d^2) over the others of its view
        rank_sum = unit.new_zeros((), dtype=torch.float64)
        for view in (0, 1):
            for first in range(0, samples, strip):
                cosine = unit[view, first : first + strip] @ unit.flatten(0, 1).T  # (s, 2N)
                positive = cosine.diagonal((1 - view) * samples + first)[:, None].clone()  # (s, 1)
                cosine.diagonal(view * samples + first).fill_(float("-inf"))  # itself
                better = (cosine > positive + tolerance).sum(dim=1)
                tied = ((cosine - positive).abs() <= tolerance).sum(dim=1) - 1  # without the positive
                rank_sum += (1 + better + tied / 2).sum()
                same_view = cosine[:, view * samples : (view + 1) * samples]
                crowding.append((4 * (same_view - 1)).logsumexp(dim=1))  # -2 d^2, with d^2 = 2 - 2 cos
        pairs_log = math.log(samples * (samples - 1))
        uniformity = (torch.cat(crowding).view(2, samples).logsumexp(dim=1) - pairs_log).mean()
        positive_rank = (rank_sum / (2 * samples)).to(unit.dtype)
    return Health(alignment, uniformity, positive_rank)

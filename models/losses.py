"""The contrastive loss."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LossConfig:
    """Settings of NT-Xent.

    Attributes:
        temperature: divides the cosine; the authors' value, the paper gives none.
    """

    temperature: Annotated[float, Field(gt=0)] = 0.5


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Normalised temperature-scaled cross entropy over N positive pairs (SimCLR; PeCLR, eq. 1 and 3).

    Each of the 2N embeddings is an anchor: its pair is the positive, the other 2N - 2 are negatives. Similarity is the
    cosine, so lengths do not matter. Computed in log space in float32, also under autocast; float64 stays float64.

    Args:
        first: (N, D), one view of each sample.
        second: (N, D), the other view, in the same order.
        temperature: divides the cosine; the authors' value is 0.5.

    Returns:
        Scalar, the mean over the 2N anchors: ln(2N - 1) if all embeddings are equal.

    Raises:
        ValueError: the shapes differ or are not (N, D).

    Example:
        >>> nt_xent(torch.eye(4), torch.eye(4))  # aligned and orthogonal: ln(1 + 6 exp(-2))
        tensor(0.5944)
    """
    if first.ndim != 2 or first.shape != second.shape:
        raise ValueError(f"views have shapes {tuple(first.shape)} and {tuple(second.shape)}, expected twice (N, D)")
    return nt_xent_rows(torch.stack([first, second]), range(len(first)), temperature)


def nt_xent_rows(embeddings: Tensor, rows: range, temperature: float = 0.5) -> Tensor:
    """The share of `nt_xent` that the anchors of some samples contribute, against the embeddings of all samples.

    The shares of ranges that partition 0..N-1 add up to `nt_xent`, and so do their gradients: with respect to all
    of `embeddings`, since every one of them stands in the denominator of every share.

    Args:
        embeddings: (2, N, D), both views of all samples.
        rows: consecutive samples whose 2 * len(rows) embeddings are the anchors.
        temperature: see `nt_xent`.

    Returns:
        Scalar, the sum over these anchors, divided by the number 2N of all.
    """
    _, samples, dim = embeddings.shape
    with torch.autocast(embeddings.device.type, enabled=False):
        exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        unit = F.normalize(exact, dim=2)
        anchors = unit[:, rows.start : rows.stop].reshape(-1, dim)  # (2n, D)
        logits = anchors @ unit.view(-1, dim).T / temperature  # (2n, 2N)
        sample = torch.arange(rows.start, rows.stop, device=embeddings.device)
        itself = torch.cat([sample, sample + samples])[:, None]  # (2n, 1), columns
        positive = torch.cat([sample + samples, sample])  # (2n,)
        logits = logits.scatter(1, itself, float("-inf"))
        return F.cross_entropy(logits, positive, reduction="sum") / (2 * samples)

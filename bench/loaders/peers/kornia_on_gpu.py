"""kornia as a peer, if it is installed: it augments whole batches that torchvision decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.loaders.peers import paper_draws
from bench.loaders.peers.paper_draws import BoxArray
from bench.loaders.peers.torchvision_v2 import decoded, torchvision_crop


def batches_on_gpu(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) float32 in [0, 1]."""
    from kornia.augmentation import AugmentationSequential, ColorJiggle, RandomAffine

    augment: Any = AugmentationSequential(
        RandomAffine(paper_draws.ROTATION_DEG, (paper_draws.SHIFT_FRAC[1],) * 2, paper_draws.SCALE, p=1.0),
        ColorJiggle(
            paper_draws.VALUE, 0.0, paper_draws.SATURATION, (paper_draws.HUE[0] / 2, paper_draws.HUE[1] / 2), p=1.0
        ),
        data_keys=["input"],
    )
    for sources, boxes in decoded(paths, boxes_px, threads, batch):
        hands = torch.stack([torchvision_crop(*one) for one in zip(sources, boxes, strict=True)]).float() / 255
        yield torch.stack([augment(hands), augment(hands)])

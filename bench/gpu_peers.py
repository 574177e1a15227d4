"""Peers that decode and augment on a GPU: torchvision's decoder, then torchvision's transforms or kornia's.

Without a GPU the same runs on the CPU, where the tests look at it; nobody would use it so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from bench import augmentation as ranges
from bench.augmentation import draw, endless_batches
from bench.dataloader_peers import torchvision_crop, torchvision_views

_BATCHES_AHEAD: Final = 3

Boxes = npt.NDArray[np.float32]


def start_torchvision(paths: Sequence[Path], boxes_px: Boxes, threads: int, batch: int) -> Iterator[int]:
    """Endless sizes of batches of uint8 views; v2 has no draws of their own for the images of a batch."""
    return _sizes(torchvision_batches(paths, boxes_px, threads, batch))


def start_kornia(paths: Sequence[Path], boxes_px: Boxes, threads: int, batch: int) -> Iterator[int]:
    """Endless sizes of batches of float views and their matrices."""
    return _sizes(kornia_batches(paths, boxes_px, threads, batch))


def _sizes(batches: Iterator[Tensor]) -> Iterator[int]:
    for views in batches:
        if views.is_cuda:
            torch.cuda.current_stream().synchronize()  # so that the batch is there when it is counted
        yield views.shape[1]


def torchvision_batches(paths: Sequence[Path], boxes_px: Boxes, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) uint8."""
    rng = np.random.default_rng()
    for sources, boxes in _decoded(paths, boxes_px, threads, batch):
        draws = draw(2 * batch, rng)
        pairs = zip(draws[::2], draws[1::2], strict=True)
        made = [torch.stack([*torchvision_views(*one)]) for one in zip(sources, boxes, pairs, strict=True)]
        yield torch.stack(made, dim=1)


def kornia_batches(paths: Sequence[Path], boxes_px: Boxes, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) float32 in [0, 1]."""
    from kornia.augmentation import AugmentationSequential, ColorJiggle, RandomAffine

    augment: Any = AugmentationSequential(
        RandomAffine(ranges.ROTATION_DEG, (ranges.SHIFT_FRAC[1],) * 2, ranges.SCALE, p=1.0),
        ColorJiggle(ranges.VALUE, 0.0, ranges.SATURATION, (ranges.HUE[0] / 2, ranges.HUE[1] / 2), p=1.0),
        data_keys=["input"],
    )
    for sources, boxes in _decoded(paths, boxes_px, threads, batch):
        hands = torch.stack([torchvision_crop(*one) for one in zip(sources, boxes, strict=True)]).float() / 255
        yield torch.stack([augment(hands), augment(hands)])


def _decoded(
    paths: Sequence[Path], boxes_px: Boxes, threads: int, batch: int
) -> Iterator[tuple[list[Tensor], list[list[float]]]]:
    """Endless batches of sources, each (3, H, W) uint8 on the GPU if there is one, and their boxes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = endless_batches(len(paths), batch)
    with ThreadPoolExecutor(threads) as readers:

        def start(samples: list[int]) -> tuple[list[int], Iterator[Tensor]]:
            return samples, readers.map(_read, [paths[sample] for sample in samples])

        ahead = deque(start(samples) for samples in islice(batches, _BATCHES_AHEAD))
        while True:
            samples, files = ahead.popleft()
            sources = decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device)
            ahead.append(start(next(batches)))
            yield sources, boxes_px[samples].tolist()


def _read(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))

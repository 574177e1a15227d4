"""Shared by the peers on torch's DataLoader: one worker process per core, and batches in shared memory."""

from __future__ import annotations

import math
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from peclr_dali.bench.loaders.peers.paper_draws import VIEW_PX, BoxArray, PeerDraw, draw, endless_batches

T = TypeVar("T")


class Files(Dataset[T]):
    """Image files that a peer makes views of.

    Args:
        paths: (N,) image files.
        boxes_px: (N, 3) centre x, centre y and side of the square around the hand; side 0 is the whole image.
    """

    def __init__(self, paths: Sequence[Path], boxes_px: BoxArray) -> None:
        self.paths = [str(path) for path in paths]
        self.boxes_px = boxes_px

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def batches(cls, paths: Sequence[Path], boxes_px: BoxArray, workers: int, batch: int) -> DataLoader[Any]:
        """Endless batches from worker processes, with torch's default prefetch_factor; 4 or 8 were not faster.

        Samples are collated by torch's default function. Batches of `ViewsOfFiles` are passed on as the workers filled
        them.
        """
        context = multiprocessing.get_context("forkserver")  # a plain fork is unsafe beside DALI's threads
        context.set_forkserver_preload([cls.__module__])
        return DataLoader(
            cls(paths, boxes_px),
            batch_sampler=endless_batches(len(paths), batch),
            num_workers=workers,
            collate_fn=default_convert if issubclass(cls, ViewsOfFiles) else None,
            worker_init_fn=_one_thread,
            multiprocessing_context=context,
            persistent_workers=True,
        )


class ViewsOfFiles(Files[Tensor], ABC):
    """Two augmented views of each image of a list, a batch at a time."""

    def __getitems__(self, samples: Sequence[int]) -> Tensor:
        """The views of a batch, (2, N, 3, 128, 128) uint8 in shared memory, channels-last."""
        views = self.empty((2, len(samples), VIEW_PX, VIEW_PX, 3))
        draws = draw(2 * len(samples), np.random.default_rng(int(torch.randint(2**62, ()))))
        for place, sample in enumerate(samples):
            pair = (draws[2 * place], draws[2 * place + 1])
            self.make_views(self.paths[sample], self.boxes_px[sample].tolist(), pair, views[:, place])
        return views.permute(0, 1, 4, 2, 3)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised uint8 in shared memory, so that handing it over copies nothing."""
        storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)

    @abstractmethod
    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[PeerDraw, PeerDraw], out: Tensor) -> None:
        """Write one image's views into `out`, (2, 128, 128, 3) uint8."""


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)

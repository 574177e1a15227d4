"""Shared by the peers on torch's DataLoader: one worker process per core, and batches in shared memory."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from peclr_dali.bench.peers.paper_views import VIEW_PX, Files, endless_batches

MakeBatch = Callable[[Files, Sequence[int]], Any]


class _Batches(Dataset[Any]):
    """A worker gets the samples of a batch and makes it whole."""

    def __init__(self, make_batch: MakeBatch, files: Files) -> None:
        self._make_batch, self._files = make_batch, files

    def __getitem__(self, samples: Sequence[int]) -> Any:
        return self._make_batch(self._files, samples)


def in_workers(make_batch: MakeBatch, files: Files, workers: int, batch: int) -> DataLoader[Any]:
    """Endless batches from worker processes, with torch's default prefetch_factor; 4 or 8 were not faster."""
    context = multiprocessing.get_context("forkserver")  # a plain fork is unsafe beside DALI's threads
    context.set_forkserver_preload([make_batch.__module__])
    return DataLoader(
        _Batches(make_batch, files),
        sampler=endless_batches(len(files.paths), batch),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_one_thread,
        multiprocessing_context=context,
        persistent_workers=True,
    )


def shared_views(images: int) -> Tensor:
    """(2, N, 128, 128, 3) uint8, uninitialised, in shared memory, so that handing it over copies nothing."""
    shape = (2, images, VIEW_PX, VIEW_PX, 3)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)

"""SPDL as a peer, if it is installed: tuned OpenCV in SPDL's threads, without worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import torch
from spdl.pipeline import PipelineBuilder
from torch import Tensor

from peclr_dali.bench.loaders.peers.opencv import OpencvViews
from peclr_dali.bench.loaders.peers.paper_draws import BoxArray, endless_batches

_BATCHES_AHEAD: Final = 2


class ViewsInThreads(OpencvViews):
    """Tuned OpenCV without shared memory, since the batches stay in the process."""

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised uint8."""
        return torch.from_numpy(np.empty(shape, np.uint8))


def batches(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) uint8, made by OpenCV in `threads` threads of SPDL."""
    cv2.setNumThreads(0)
    views = ViewsInThreads(paths, boxes_px)
    pipeline = (
        PipelineBuilder()
        .add_source(endless_batches(len(paths), batch))
        .pipe(views.__getitems__, concurrency=threads)
        .add_sink(_BATCHES_AHEAD)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield from pipeline

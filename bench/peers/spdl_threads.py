"""SPDL as a peer, if it is installed: tuned OpenCV in SPDL's threads, without worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import cv2
import numpy as np
import torch
from spdl.pipeline import PipelineBuilder
from torch import Tensor

from peclr_dali.bench.peers.opencv_tuned import make_batch
from peclr_dali.bench.peers.workers import VIEW_PX, Files, endless_batches


def batches(files: Files, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) uint8, made by OpenCV in `threads` threads of SPDL."""
    cv2.setNumThreads(0)
    pipeline = (
        PipelineBuilder()
        .add_source(endless_batches(len(files.paths), batch))
        .pipe(partial(make_batch, files, empty=_views), concurrency=threads)
        .add_sink(2)  # batches ahead
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield from pipeline


def _views(images: int) -> Tensor:
    return torch.from_numpy(np.empty((2, images, VIEW_PX, VIEW_PX, 3), np.uint8))

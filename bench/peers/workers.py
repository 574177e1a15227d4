"""What the peers share: the paper's two views of each image, and worker processes of torch's DataLoader."""

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from peclr_dali.pipelines.arrays import DoubleArray, FloatArray


class Files(NamedTuple):
    """Image files that a peer makes views of."""

    paths: Sequence[str]  # (N,) files that can be decoded
    boxes_px: FloatArray  # (N, 3) centre x, centre y and side of the square around each hand, in upright source pixels
    side_px: int  # side S of the views


class Draws(NamedTuple):
    """Augmentations of views: a number each for one view, arrays of one shape for many.

    Hue, saturation and value are factors; value_shift is added to the value, in fractions of 1.
    """

    rotation_deg: Any
    x_frac: Any
    y_frac: Any
    scale: Any
    hue: Any
    saturation: Any
    value: Any
    value_shift: Any

    def at(self, *place: int) -> "Draws":
        """The numbers of one view."""
        return Draws(*(float(column[place]) for column in self))


RANGES = Draws(
    rotation_deg=(-45.0, 45.0), x_frac=(-15 / 128, 15 / 128), y_frac=(-15 / 128, 15 / 128), scale=(0.6, 2.0),
    hue=(0.01, 1.0), saturation=(0.01, 1.0), value=(0.5, 1.0), value_shift=(5 / 255, 20 / 255),
)  # fmt: skip


def draw(*shape: int) -> Draws:
    """Independent draws for views of this shape, seeded by torch, whose seeds differ between worker processes."""
    rng, (low, high) = np.random.default_rng(int(torch.randint(2**62, ()))), np.transpose(RANGES)
    return Draws(*np.moveaxis(rng.uniform(low, high, (*shape, len(RANGES))), -1, 0))


def source_to_view_px(boxes_px: Any, draws: Draws, view_px: int) -> DoubleArray:
    """(..., 2, 3) matrices from source to view, both corner-based, of boxes (..., 3) and draws (...)."""
    x_px, y_px, side_px = np.moveaxis(boxes_px, -1, 0)
    angle_rad, magnification = np.radians(draws.rotation_deg), draws.scale * view_px / side_px
    cosine, sine = magnification * np.cos(angle_rad), magnification * np.sin(angle_rad)
    to_x_px = view_px * (0.5 + draws.x_frac) - cosine * x_px + sine * y_px
    to_y_px = view_px * (0.5 + draws.y_frac) - sine * x_px - cosine * y_px
    return np.stack([cosine, -sine, to_x_px, sine, cosine, to_y_px], axis=-1).reshape(*to_x_px.shape, 2, 3)


def endless_batches(samples: int, batch: int) -> Iterator[list[int]]:
    """Whole batches of shuffled epochs, one after the other; a batch may span epochs."""
    rng = np.random.default_rng()
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += rng.permutation(samples).tolist()
        yield order[:batch]
        del order[:batch]


def in_workers(
    make_batch: Callable[[Files, Sequence[int]], Any], files: Files, workers: int, batch: int
) -> DataLoader[Any]:
    """Endless batches from worker processes, with torch's default prefetch_factor; 4 or 8 were not faster."""
    context = multiprocessing.get_context("forkserver")  # a plain fork is unsafe beside DALI's threads
    context.set_forkserver_preload([make_batch.__module__])
    return DataLoader(
        range(len(files.paths)),  # type: ignore[arg-type]  # a worker gets the samples of a batch and makes it whole
        batch_sampler=endless_batches(len(files.paths), batch),
        collate_fn=partial(make_batch, files),
        num_workers=workers,
        worker_init_fn=_one_thread,
        multiprocessing_context=context,
        persistent_workers=True,
    )


def shared_views(images: int, side_px: int) -> Tensor:
    """(2, N, S, S, 3) uint8, uninitialised, in shared memory, so that handing it over copies nothing."""
    shape = (2, images, side_px, side_px, 3)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)

"""What our loader is compared with: other ways from the same files and boxes to the same two views.

Each makes two 128 x 128 views of every image: rotation in [-45, 45] degrees, translation of up to 15/128 of the output
side, scale in [0.6, 2], and jitter of hue, saturation and value. All shuffle, and all run without end, so that no
peer pays for a restart between epochs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from bench import dali_peers, dataloader_peers, gpu_peers

Start = Callable[[Sequence[Path], npt.NDArray[np.float32], int, int], Iterator[int]]
"""(paths (N), boxes_px (N, 3): centre x, y, side, threads or processes, images a batch) -> sizes of endless batches."""


@dataclass(frozen=True)
class Peer:
    """One way to load.

    Attributes:
        name: short, for a table.
        description: what it does and what it hands over.
        views: views of an image, 0 where only the source is decoded.
        start: makes the endless iterator.
        needs: package without which it cannot run, beyond those of this project.
        on_gpu: whether it runs on a GPU, and only there.
    """

    name: str
    description: str
    views: int
    start: Start
    needs: str | None = None
    on_gpu: bool = False


def _when_asked(module: str) -> Start:
    """The `start` of a module that imports what may not be installed."""

    def start(paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int) -> Iterator[int]:
        sizes: Iterator[int] = importlib.import_module(module).start(paths, boxes_px, threads, batch)
        return sizes

    return start


PEERS: Final = [
    Peer(
        "decode only (DALI)",
        "the ceiling of loaders that decode whole images: DALI reads and decodes on the CPU, no views; uint8 "
        "sources of their own sizes",
        0,
        dali_peers.start_decode_only,
    ),
    Peer(
        "OpenCV + DataLoader",
        "the authors' pipeline, in its own steps: a sample at a time, imread, cvtColor, warpAffine of the whole image, "
        "crop, resize by area, OpenCV's 8-bit HSV jittered in NumPy, ToTensor and Normalize; float32 views and their "
        "matrices, default collation",
        2,
        dataloader_peers.start_authors,
    ),
    Peer(
        "OpenCV + DataLoader, lean",
        "the same jitter in fewer steps: one warpAffine from source to view, uint8 views and their matrices, default "
        "collation",
        2,
        dataloader_peers.start_opencv,
    ),
    Peer(
        "OpenCV + DataLoader, tuned",
        "lean, made faster than people write it: look-up tables in HSV, whole batches by __getitems__, "
        "written straight into shared memory; no matrices",
        2,
        dataloader_peers.start_tuned_opencv,
    ),
    Peer(
        "torchvision v2 + DataLoader",
        "decode_image, the box resized once, v2's affine, saturation, hue (added: v2 has no factor) and brightness; "
        "worker processes fill uint8 batches in shared memory; black beyond the box",
        2,
        dataloader_peers.start_torchvision,
    ),
    Peer(
        "DALI, plain",
        "all in a DALI graph on the CPU: decode, warp_affine, fn.hsv (linear; hue added), normalised float",
        2,
        dali_peers.start_plain,
    ),
    Peer(
        "OpenCV, tuned + SPDL",
        "tuned OpenCV in the threads of SPDL's pipeline, without worker processes",
        2,
        _when_asked("bench.spdl_peer"),
        needs="spdl",
    ),
    Peer(
        "FFCV",
        "packed beforehand, the files' own JPEG bytes; FFCV's decoder, both views by an operation in Numba (FFCV has "
        "neither rotation nor hue); uint8; for sources of one size",
        2,
        _when_asked("bench.ffcv_peer"),
        needs="ffcv",
    ),
    Peer(
        "torchvision v2, GPU",
        "torchvision's decoder and v2's functional transforms on the GPU, an image at a time, as v2 has it; files read "
        "by threads; uint8 views",
        2,
        gpu_peers.start_torchvision,
        on_gpu=True,
    ),
    Peer(
        "torchvision + kornia, GPU",
        "torchvision's decoder, the box resized once, then kornia's RandomAffine and ColorJiggle on whole batches on "
        "the GPU; files read by threads; float views and their matrices",
        2,
        gpu_peers.start_kornia,
        needs="kornia",
        on_gpu=True,
    ),
]
"""All that `bench-loader` knows; to add one, add it here."""


def installed_peers() -> list[Peer]:
    """Those of `PEERS` that can run here."""
    return [peer for peer in PEERS if _runs_here(peer)]


def _runs_here(peer: Peer) -> bool:
    if peer.on_gpu and not torch.cuda.is_available():
        return False
    return peer.needs is None or importlib.util.find_spec(peer.needs) is not None

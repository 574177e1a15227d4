"""Peers: other loaders that make the same two views from the same files and boxes.

Each makes two 128 x 128 views of every image: rotation in [-45, 45] degrees, translation of up to 15/128 of the output
side, scale in [0.6, 2], and jitter of hue, saturation and value. All shuffle. All are endless, so that no restart
between epochs is measured.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Peer:
    """Another loader.

    Attributes:
        function: "module:function" or "module:class.function" in this package. It has the arguments of `start` and
            yields batches without end. The first part of a batch has one item for each image.
        description: its steps and its outputs, for a table.
        needs: package that it needs beyond this project's own.
    """

    function: str
    description: str
    needs: str | None = None

    def start(
        self, paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int
    ) -> Generator[int]:
        """Start an endless iteration over batches with so many threads or processes; yields the size of each batch.

        `paths` and `boxes_px` are those of `peers.workers.Files`.
        """
        for views, *_ in pkgutil.resolve_name(f"{__name__}.{self.function}")(paths, boxes_px, threads, batch):
            yield len(views)


PEERS: Final = {
    "decode only (DALI)": Peer(
        "dali:sources",
        "DALI reads and decodes whole images on the CPU and makes no views: an upper limit for loaders that decode "
        "whole images",
    ),
    "OpenCV + DataLoader": Peer(
        "opencv:AuthorsSamples.batches",
        "the steps of the authors' pipeline, one sample at a time: imread, cvtColor, warpAffine of the whole image, "
        "crop, resize by area, OpenCV's 8-bit HSV jittered in NumPy, ToTensor and Normalize; float32 views and their "
        "matrices, default collation",
    ),
    "OpenCV + DataLoader, lean": Peer(
        "opencv:OpencvSamples.batches",
        "the same jitter in fewer steps: one warpAffine from source to view, uint8 views and their matrices, default "
        "collation",
    ),
    "OpenCV + DataLoader, tuned": Peer(
        "opencv:OpencvViews.batches",
        "as lean, with look-up tables in HSV and whole batches by __getitems__, written straight into shared memory; "
        "no matrices",
    ),
    "torchvision v2 + DataLoader": Peer(
        "torchvision_v2:TorchvisionViews.batches",
        "decode_image, the box resized once, v2's affine, saturation, hue (added: v2 has no factor) and brightness; "
        "worker processes fill uint8 batches in shared memory; black beyond the box",
    ),
    "DALI, plain": Peer(
        "dali:views",
        "all in a DALI graph on the CPU: decode, warp_affine, fn.hsv (linear; hue added), normalised float",
    ),
    "OpenCV, tuned + SPDL": Peer(
        "spdl_threads:batches",
        "tuned OpenCV in the threads of SPDL's pipeline, without worker processes",
        needs="spdl",
    ),
    "FFCV": Peer(
        "ffcv_packed:batches",
        "a file packed beforehand with the files' own JPEG bytes; FFCV's decoder; both views by an operation in Numba, "
        "since FFCV has neither rotation nor hue; uint8; for images of one size",
        needs="ffcv",
    ),
    "FFCV, raw": Peer(
        "ffcv_packed:raw_batches",
        "packed beforehand as decoded pixels, whole images; both views by the same operation; for sources of one size",
        needs="ffcv",
    ),
}
"""Name in the tables -> peer. A new peer is a file in this folder and an entry here."""


def installed_peers() -> dict[str, Peer]:
    """The peers that can run on this machine."""
    return {name: peer for name, peer in PEERS.items() if peer.needs is None or find_spec(peer.needs) is not None}

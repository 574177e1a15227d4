"""Peers: other loaders that make the same two views from the same files and boxes.

Each makes two 128 x 128 views of every image: rotation in [-45, 45] degrees, translation of up to 15/128 of the output
side, scale in [0.6, 2], and jitter of hue, saturation and value. All shuffle. All are endless, so that no restart
between epochs is measured.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import pkgutil
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from errors import UserError

_ENDS_WITHIN_S: Final = 10.0
"""Seconds after which the process of a peer is killed when it is no longer needed."""


@dataclass(frozen=True)
class Peer:
    """Another loader.

    Attributes:
        function: "module:function" or "module:class.function" in this package. It has the arguments of `start` and
            yields batches without end. The first part of a batch has one item for each image.
        description: its steps and its outputs, for a table.
        views: number of views of an image; 0 if it only decodes.
        needs: package that it needs beyond this project's own.
        on_gpu: whether it runs on a GPU, and only there.
        own_process: whether it runs in a separate process. A peer that would decode in the calling process needs one,
            since commands set malloc there for our loader (`machine.freed_memory`).
    """

    function: str
    description: str
    views: int = 2
    needs: str | None = None
    on_gpu: bool = False
    own_process: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether its package is installed and its device is present."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return False
        if not self.on_gpu:
            return True
        import torch  # only here, so that a peer's own process starts faster

        return torch.cuda.is_available()

    def start(
        self, paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int
    ) -> Generator[int]:
        """Start an endless iteration over batches.

        Args:
            paths: (N,) image files.
            boxes_px: (N, 3) centre x, centre y and side of the square around the hand; side 0 is the whole image.
            threads: threads or processes.
            batch: images in a batch.

        Returns:
            The size of each batch, when it is finished.
        """
        arguments = (self.function, paths, boxes_px, threads, batch)
        return _in_own_process(*arguments) if self.own_process else _start(*arguments)


def _start(function: str, *arguments: object) -> Generator[int]:
    for views, *_ in pkgutil.resolve_name(f"{__name__}.{function}")(*arguments):
        if getattr(views, "is_cuda", False):
            import torch  # only here, so that a peer's own process starts faster

            torch.cuda.current_stream().synchronize()  # a batch counts when the device has finished it
        yield len(views)


def _in_own_process(*arguments: object) -> Generator[int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_sizes, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        raise UserError(
            f"the loader {arguments[0]} ended, see its messages above: leave other loaders out with --no-peers"
        ) from None
    finally:
        receiver.close()  # sending to a closed pipe ends the process
        process.join(_ENDS_WITHIN_S)
        process.kill()
        process.join()


def _send_sizes(sender: Connection, function: str, *arguments: object) -> None:
    with suppress(BrokenPipeError), closing(_start(function, *arguments)) as sizes:
        for size in sizes:
            sender.send(size)


PEERS: Final = {
    "decode only (DALI)": Peer(
        "dali:sources",
        "DALI reads and decodes whole images on the CPU and makes no views: an upper limit for loaders that decode "
        "whole images",
        views=0,
        own_process=True,
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
        own_process=True,
    ),
    "OpenCV, tuned + SPDL": Peer(
        "spdl_threads:batches",
        "tuned OpenCV in the threads of SPDL's pipeline, without worker processes",
        needs="spdl",
        own_process=True,
    ),
    "FFCV": Peer(
        "ffcv_packed:batches",
        "a file packed beforehand with the files' own JPEG bytes; FFCV's decoder; both views by an operation in Numba, "
        "since FFCV has neither rotation nor hue; uint8; for images of one size",
        needs="ffcv",
        own_process=True,
    ),
    "FFCV, raw": Peer(
        "ffcv_packed:raw_batches",
        "packed beforehand as decoded pixels, whole images; both views by the same operation; for sources of one size",
        needs="ffcv",
        own_process=True,
    ),
    "torchvision v2, GPU": Peer(
        "torchvision_v2:batches_on_gpu",
        "torchvision's decoder and v2's functional transforms on the GPU, one image at a time, since v2 draws "
        "once per call; threads read the files; uint8 views",
        on_gpu=True,
    ),
    "torchvision + kornia, GPU": Peer(
        "kornia_on_gpu:batches_on_gpu",
        "torchvision's decoder, the box resized once, then kornia's RandomAffine and ColorJiggle on whole batches on "
        "the GPU; threads read the files; float views and their matrices",
        needs="kornia",
        on_gpu=True,
    ),
}
"""Name in the tables -> peer. A new peer is a file in this folder and an entry here."""


def installed_peers() -> dict[str, Peer]:
    """The peers that can run on this machine."""
    return {name: peer for name, peer in PEERS.items() if peer.runs_here}

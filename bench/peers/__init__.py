"""Peers: other loaders that make the same two views from the same files and boxes, a file for each.

Each makes two square views of every image: rotation in [-45, 45] degrees, translation of up to 15/128 of their side,
scale in [0.6, 2], and jitter of hue, saturation and value. All shuffle. All are endless, so that no restart
between epochs is measured.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Generator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from peclr_dali.bench.peers.workers import Files, in_workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """Another loader. The first part of each of its batches has one item for each image."""

    function: str  # "module:function" here: (files, threads, images in a batch) -> batches without end
    in_workers: bool = False  # or (files, samples) -> a batch, for worker processes of torch's DataLoader
    package: str | None = None  # beyond this project's own packages
    on_gpu: bool = False  # it needs a GPU
    jpeg_only: bool = False

    def start(self, files: Files, threads: int, batch: int) -> Generator[int]:
        """Load batches without end with so many threads or processes, and yield their numbers of images."""
        function = pkgutil.resolve_name(f"{__name__}.{self.function}")
        batches = in_workers(function, files, threads, batch) if self.in_workers else function(files, threads, batch)
        for views, *_ in batches:
            if self.on_gpu:
                torch.cuda.current_stream().synchronize()  # a batch counts when it is finished
            if len(views) != batch:
                raise ValueError(f"{self.function}: {len(views)} first views in a batch of {batch} images")
            yield batch


PEERS: Final = {
    "OpenCV + DataLoader": Peer("opencv:make_batch_as_authors", in_workers=True),
    "OpenCV + DataLoader, tuned": Peer("opencv:make_batch", in_workers=True),
    "OpenCV, tuned + SPDL": Peer("opencv:spdl_batches", package="spdl"),
    "torchvision v2 + DataLoader": Peer("torchvision:make_batch", in_workers=True),
    "DALI, plain": Peer("dali_plain:on_cpu"),
    "DALI, plain, on the GPU": Peer("dali_plain:on_gpu", on_gpu=True),
    "torchvision + grid_sample, on the GPU": Peer("torchvision:batches", on_gpu=True, jpeg_only=True),
}
"""Name in the tables -> peer. docs/performance.md says what each does. A new peer is a file here and an entry."""


def offered_peers(files: Files, device: torch.device) -> dict[str, Peer]:
    """The peers that can run here; logs why the others cannot."""
    offered, only_jpegs = {}, all(path.lower().endswith((".jpg", ".jpeg")) for path in files.paths)
    for name, peer in PEERS.items():
        if peer.on_gpu and device.type != "cuda":
            log.info("left out: %s, which needs a GPU", name)
        elif peer.jpeg_only and not only_jpegs:
            log.info("left out: %s, which reads JPEGs only", name)
        elif peer.package is not None and find_spec(peer.package) is None:
            log.info("left out: %s, since the package %s is not installed", name, peer.package)
        else:
            offered[name] = peer
    return offered

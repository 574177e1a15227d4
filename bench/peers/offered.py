"""The peers by their names in the tables; docs/performance.md says what each does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from peclr_dali.bench.peers import dali_plain, opencv, torchvision
from peclr_dali.bench.peers.workers import Files

log = logging.getLogger(__name__)

SPDL: Final = "OpenCV, tuned + SPDL"
PEERS: Final[dict[str, Callable[[Files, int, int], Iterable[Any]]]] = {
    "OpenCV + DataLoader": opencv.batches_as_authors,
    "OpenCV + DataLoader, tuned": opencv.batches,
    SPDL: opencv.spdl_batches,
    "torchvision v2 + DataLoader": torchvision.batches,
    "DALI, plain": dali_plain.batches,
}
"""Functions of files, threads or processes, and images in a batch, which make batches without end."""


@dataclass(frozen=True)
class Peer:
    """A peer with its files."""

    name: str
    files: Files
    threads: int
    batch: int

    def images(self) -> Generator[int]:
        """Load batches without end and yield their numbers of images."""
        for first_views, *_ in PEERS[self.name](self.files, self.threads, self.batch):
            if len(first_views) != self.batch:
                raise ValueError(f"{self.name}: {len(first_views)} first views in a batch of {self.batch} images")
            yield self.batch


def offered_peers(files: Files, threads: int, batch: int) -> list[Peer]:
    """The peers that can run here; a log line says which cannot."""
    names = [*PEERS]
    if find_spec("spdl") is None:  # no requirement of this project
        log.info("left out: %s, since the package spdl is not installed", SPDL)
        names.remove(SPDL)
    return [Peer(name, files, threads, batch) for name in names]

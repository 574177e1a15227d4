"""Our loader, as bench-loader runs it, and checks of data and machine before a measurement."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.measure import Rounds, require_images
from errors import UserError
from machine.cores import available_cores
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.loader import Loader
from pipelines.samples.index import Index
from pipelines.samples.order import RankSlice, Schedule, build_order
from pipelines.samples.store import in_order
from pipelines.sources import load_index
from train.config.pretraining import Config

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(Rounds):
    """Settings of a measurement of loaders.

    Attributes:
        cores: number of cores that each loader may use.
        batch: images in a batch.
        pixels: folder of the same images as pixels, to measure our loader on these too.
        peers: whether to measure other loaders too.
        only_peers: names of the other loaders to measure; empty: all that are installed.
        passes: passes over all files, with a warm and with a cold page cache: 0, or at least 2 for an interval.
    """

    cores: int
    batch: int = 256
    repeats: int = 7
    pixels: str | None = None
    peers: bool = True
    only_peers: tuple[str, ...] = ()
    passes: int = 3


def make_endless_loader(index: Index, config: Config, batch: int, device: torch.device) -> Loader:
    """Our loader as configured, for one rank. It does not end."""
    schedule = Schedule(build_order(index, batch=batch, seed=config.run.seed), RankSlice(batch, 0, batch))
    return Loader(index, schedule, config.pipelines, config.augmentation, device=device)


def our_batches(index: Index, config: Config, batch: int, device: torch.device = CPU) -> Generator[int]:
    """Load batches without end and yield their sizes. Closing the generator closes the loader."""
    with make_endless_loader(index, config, batch, device) as loader:
        for made in loader:
            if device.type == "cuda":
                made.to(device)
                torch.cuda.current_stream(device).synchronize()  # a batch counts when it has arrived
            yield len(made)


def thread_counts(cores: int) -> list[int]:
    """Powers of two below the number of cores, and that number."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def load_enough(config: Config, settings: LoaderSettings) -> Index:
    """The index of a configuration's data. Fewer images than a batch, or too few cores, are a `UserError`."""
    index = load_index(config.data)
    require_images(len(index), settings.batch, index.root)
    if settings.cores > available_cores():
        raise UserError(f"--cores {settings.cores}: this process may use {available_cores()}. Give a smaller number.")
    return index


def require_sound(index: Index) -> None:
    """Read and check every file, since other loaders stop at a bad one. A bad file is a `UserError`.

    Pixels that are kept decoded have nothing to check.
    """
    if index.pixels is not None:
        return
    bad: list[tuple[Path, str]] = []
    steps = in_order(len(index), 256)
    with closing(index.follow(lambda: iter(steps))) as follower:
        for rows in steps:
            for sample in rows.tolist():
                try:
                    check_image(np.frombuffer(index.read(sample), np.uint8))
                except (OSError, BadImage) as error:
                    bad.append((index.path(sample), getattr(error, "strerror", None) or str(error)))
            follower.done()
    if bad:
        path, reason = bad[0]
        raise UserError(
            f"{len(bad)} of {len(index)} images cannot be used, the first being {path} ({reason}): list them with "
            "'python cli.py check-data' and leave them out with --set data.bad_list=..."
        )


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Remove these files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file)  # a page that is not on disk yet stays in the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

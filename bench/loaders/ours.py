"""Our loader as what is measured, and what has to be so before it is."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.measure import Rounds
from errors import UserError
from machine.cores import available_cores
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.loader import Loader
from pipelines.render.backends import prepare_process
from pipelines.samples.index import Index
from pipelines.samples.order import RankSlice, Schedule, build_order
from train.config.pretraining import Config

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(Rounds):
    """How long and on what to measure.

    Attributes:
        cores: that everything is limited to.
        batch: images in a batch.
        peers: whether to measure what people use instead.
        only_peers: the names of those to measure; none: all that are installed.
        passes: over all files, warm and cold; 0 for none, else at least 2, for an interval.
    """

    cores: int
    batch: int = 256
    repeats: int = 7
    peers: bool = True
    only_peers: tuple[str, ...] = ()
    passes: int = 3


def make_loader(index: Index, config: Config, batch: int, device: torch.device) -> Loader:
    """Our loader as configured, for one rank, without end."""
    prepare_process(config.pipelines, device)
    schedule = Schedule(build_order(index, batch=batch, seed=config.run.seed), RankSlice(batch, 0, batch))
    return Loader(index, schedule, config.pipelines, config.augmentation, device=device)


def our_batches(index: Index, config: Config, batch: int, device: torch.device = CPU) -> Generator[int]:
    """Endless sizes of batches of our loader; closing it closes the loader."""
    with make_loader(index, config, batch, device) as loader:
        for made in loader:
            if device.type == "cuda":
                made.to(device)
                torch.cuda.current_stream(device).synchronize()  # so that the batch is there when it is counted
            yield len(made)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def require_enough(index: Index, settings: LoaderSettings) -> None:
    """Whether the settings fit the data and the machine.

    Raises:
        UserError: the data has fewer images than a batch, or there are not that many cores.
    """
    if len(index) < settings.batch:
        raise UserError(f"{index.root} has {len(index)} images, fewer than a batch of {settings.batch}")
    if settings.cores > available_cores():
        raise UserError(f"--cores {settings.cores}: this process may use {available_cores()}")


def require_sound(index: Index) -> None:
    """Read every file.

    Raises:
        UserError: one cannot be used: other loaders would stop at it, and ours would tell of it again and again.
    """
    bad: list[tuple[Path, str]] = []
    for sample in range(len(index)):
        try:
            check_image(np.frombuffer(index.read(sample), np.uint8))
        except (OSError, BadImage) as error:
            bad.append((index.path(sample), getattr(error, "strerror", None) or str(error)))
    if bad:
        path, reason = bad[0]
        raise UserError(
            f"{len(bad)} of {len(index)} images cannot be used, the first being {path} ({reason}): list them with "
            "'python cli.py check-data' and leave them out with --set data.bad_list=..."
        )


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Let the kernel forget what it holds of these files, so that the next read is the disk's."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file)  # a page that is not on disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

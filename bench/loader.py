"""`bench-loader`: our loader beside its ceilings and beside what people use instead, in one run on the same cores."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bench.measure import Interval, Rate, Start, interval_of_mean, limited_to_cores, measure_in_rounds
from bench.peers import installed_peers
from bench.stages import stages
from bench.verdict import PageCache, verdict
from errors import UserError
from machine.cores import available_cores
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.loader import Loader
from pipelines.render.backends import prepare_process
from pipelines.samples.index import Index
from pipelines.samples.order import RankSlice, Schedule, build_order
from pipelines.sources import load_index
from train.config.pretraining import Config

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_VIEWS = 2


@dataclass(frozen=True)
class Settings:
    """How long and on what to measure.

    Attributes:
        cores: that everything is limited to.
        batch: images in a batch.
        repeats: rounds, in each of which everything is timed once.
        repeat_s: least length of a repeat.
        warmup_s: left out before each repeat, from the first batch on.
        peers: whether to measure what people use instead.
        only_peers: the names of those to measure; none: all that are installed.
        passes: over all files, warm and cold; 0 for none.
    """

    cores: int
    batch: int = 256
    repeats: int = 7
    repeat_s: float = 2.0
    warmup_s: float = 2.0
    peers: bool = True
    only_peers: tuple[str, ...] = ()
    passes: int = 3


@dataclass(frozen=True)
class Row:
    """One loader's figures, or those of a part.

    Attributes:
        name: short, for a table.
        description: what it does.
        views: views of an image, 0 where none is made.
        rate: what was measured.
    """

    name: str
    description: str
    views: int
    rate: Rate


@dataclass(frozen=True)
class Report:
    """What one run found.

    Attributes:
        settings: of the run.
        device: where the batches of our loader were.
        ours: our loader, as configured.
        peers: other loaders.
        stages: parts of ours, each alone.
        threads: ours with other numbers of threads.
        cache: passes over warm and cold files, if made.
        step: the training step on batches that are there already, if measured.
        verdict: one sentence.
    """

    settings: Settings
    device: str
    ours: Row
    peers: list[Row]
    stages: list[Row]
    threads: dict[int, Row]
    cache: PageCache | None
    step: Rate | None
    verdict: str


def bench_loader(
    config: Config,
    settings: Settings,
    *,
    device: torch.device,
    step: Rate | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Measure our loader as configured, its parts, and every peer that is installed, taking turns.

    Args:
        config: of the run that the loader would feed.
        settings: how long and on what.
        device: where our loader's batches are to be.
        step: the training step alone, in images, which the verdict compares with.
        progress: told of the repeats done and all there are.

    Raises:
        UserError: the data cannot be used, or has fewer images than a batch.
    """
    index = load_index(config.data)
    check(index, settings)
    require_sound(index)  # which brings the files into the page cache, for all alike
    paths = [] if index.store is not None else [index.path(sample) for sample in range(len(index))]
    if index.store is not None:
        log.info("packed data: other loaders, and passes from a cold cache, which are of single files, are left out")
    ours = _Measured(
        "this loader",
        f"as configured, backend {config.pipelines.backend}",
        _VIEWS,
        _ours(index, config, settings, device),
    )
    of_stages = stages(index, config, settings.batch, device)
    parts = [_Measured(stage.name, stage.description, 0, stage.start) for stage in of_stages]
    threads = {count: _with_threads(index, config, settings, device, count) for count in thread_counts(settings.cores)}
    peers = [
        _Measured(
            peer.name,
            peer.description,
            peer.views,
            partial(peer.start, paths, index.box_px, settings.cores, settings.batch),
        )
        for peer in (installed_peers() if settings.peers and paths else [])
        if not settings.only_peers or peer.name in settings.only_peers
    ]
    gc.freeze()  # as pretraining does
    with limited_to_cores(settings.cores):
        everything = [ours, *peers, *parts, *threads.values()]
        rates = measure_in_rounds(
            [one.start for one in everything],
            warmup_s=settings.warmup_s,
            repeat_s=settings.repeat_s,
            rounds=settings.repeats,
            progress=progress,
        )
        cache = _passes(ours.start, paths, settings) if settings.passes and paths else None
    rows = [Row(one.name, one.description, one.views, rate) for one, rate in zip(everything, rates, strict=True)]
    own, of_peers = rows[0], rows[1 : 1 + len(peers)]
    of_parts, of_threads = rows[1 + len(peers) :][: len(parts)], rows[1 + len(peers) + len(parts) :]
    configured = {stage.name: row.rate for stage, row in zip(of_stages, of_parts, strict=True) if stage.as_configured}
    said = verdict(own.rate, settings.cores, configured, step=step, cache=cache)
    return Report(
        settings, str(device), own, of_peers, of_parts, dict(zip(threads, of_threads, strict=True)), cache, step, said
    )


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def check(index: Index, settings: Settings) -> None:
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
        except OSError as error:
            bad.append((index.path(sample), error.strerror or str(error)))
        except BadImage as error:
            bad.append((index.path(sample), str(error)))
    if bad:
        path, reason = bad[0]
        raise UserError(
            f"{len(bad)} of {len(index)} images cannot be used, the first being {path} ({reason}): list them with "
            "'python cli.py check-data' and leave them out with --set data.bad_list=..."
        )


def our_batches(index: Index, config: Config, batch: int, device: torch.device | None = None) -> Generator[int]:
    """Endless sizes of batches of our loader, as configured; closing it closes the loader."""
    device = torch.device("cpu") if device is None else device
    prepare_process(config.pipelines, device)
    with Loader(
        index,
        Schedule(build_order(index, batch=batch, seed=config.run.seed), RankSlice(batch, 0, batch)),
        config.pipelines,
        config.augmentation,
        device=device,
    ) as loader:
        for made in loader:
            if device.type == "cuda":
                made.to(device)
                torch.cuda.current_stream(device).synchronize()  # so that the batch is there when it is counted
            yield len(made)


@dataclass(frozen=True)
class _Measured:
    name: str
    description: str
    views: int
    start: Start


def _ours(index: Index, config: Config, settings: Settings, device: torch.device) -> Start:
    return lambda: our_batches(index, config, settings.batch, device)


def _with_threads(index: Index, config: Config, settings: Settings, device: torch.device, count: int) -> _Measured:
    pipelines = dataclasses.replace(config.pipelines, threads=count)
    changed = dataclasses.replace(config, pipelines=pipelines)
    name = f"this loader, {count} thread{'s' if count > 1 else ''}"
    return _Measured(name, f"pipelines.threads = {count}", _VIEWS, _ours(index, changed, settings, device))


def _passes(start: Start, paths: Sequence[Path], settings: Settings) -> PageCache:
    """Passes over all files, in turn from a warm and from a cold page cache; both pay for their start-up."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    batches = len(paths) // settings.batch
    for _ in range(settings.passes):
        for cold in (False, True):
            if cold:
                drop_from_page_cache(paths)
            else:
                _read_all(paths)
            began = time.perf_counter()
            making = start()
            images = sum(islice(making, batches))
            rates[cold].append(images / (time.perf_counter() - began))
            if isinstance(making, Generator):
                making.close()
    size = sum(path.stat().st_size for path in paths) / len(paths)
    return PageCache(_interval(rates[False]), _interval(rates[True]), size)


def _interval(rates: Sequence[float]) -> Interval:
    return interval_of_mean(rates) if len(rates) > 1 else Interval(rates[0], float("-inf"), float("inf"))


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Let the kernel forget what it holds of these files, so that the next read is the disk's."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not on disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_all(paths: Sequence[Path]) -> None:
    """Bring the files into the page cache, for all alike."""
    for path in paths:
        path.read_bytes()

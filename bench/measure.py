"""Measures how many images an iterator yields per second, and the processor time that it takes."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import truediv
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil  # type: ignore[import-untyped]
from scipy.stats import t as student

from errors import UserError

T = TypeVar("T")


class MeanInterval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval_of_mean(values: Sequence[float]) -> MeanInterval:
    """Mean of independent repeats, at least two, and its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Rate:
    """Source images per second in timed repeats of one run.

    Attributes:
        images_per_s: one rate for each repeat, at least two.
        cpu_s_per_image: processor seconds of this process and its descendants, over all repeats.
        images: how many images the repeats took in all.
        seconds: how long the repeats took in all.
        memory_mib: largest memory of this process and its descendants at the end of a repeat; shared memory counts
            once.
    """

    images_per_s: tuple[float, ...]
    cpu_s_per_image: float
    images: int
    seconds: float = math.nan
    memory_mib: float = math.nan

    @property
    def mean(self) -> float:
        """Mean over the repeats, source images/s."""
        return statistics.fmean(self.images_per_s)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, source images/s."""
        return interval_of_mean(self.images_per_s)[1:]

    @property
    def cores_busy(self) -> float:
        """Mean number of busy cores: processor seconds per second."""
        return self.cpu_s_per_image * self.images / self.seconds

    def over(self, other: Rate) -> MeanInterval:
        """How many times as fast as `other`, from rounds in which both were measured.

        This is the geometric mean of the rounds' ratios, since a slow round of the machine slows down both.
        """
        logs = [math.log(a / b) for a, b in zip(self.images_per_s, other.images_per_s, strict=True)]
        return MeanInterval(*map(math.exp, interval_of_mean(logs)))


Start = Callable[[], Iterator[int]]
"""Makes an endless iterator; each item is the number of source images in a finished batch."""


Progress = Callable[[int, int], None]
"""Called with the number of repeats done and the number of all repeats."""


def no_progress(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How long to measure.

    Attributes:
        repeats: number of rounds; each times everything once. At least 2, for an interval.
        repeat_s: minimum length of a repeat, which ends with a batch.
        warmup_s: seconds after the first batch that are not measured. The start-up is not measured either.
    """

    repeats: int = 5
    repeat_s: float = 2.0
    warmup_s: float = 2.0


def measure_in_rounds(starts: Sequence[Start], rounds: Rounds, progress: Progress = no_progress) -> list[Rate]:
    """Time endless iterators in their steady state, in turn: A B C, A B C, ..., so that a drift affects all of them.

    Each round starts each iterator again. Only one iterator runs at a time.

    Raises:
        ValueError: for fewer than two rounds.
        RuntimeError: an iterator ends.
    """
    if rounds.repeats < 2:
        raise ValueError(f"repeats is {rounds.repeats}; an interval needs at least 2")
    repeats: list[list[_Repeat]] = [[] for _ in starts]
    for number in range(rounds.repeats):
        for place, start in enumerate(starts):
            progress(number * len(starts) + place, rounds.repeats * len(starts))
            repeats[place].append(_repeat(start, rounds))
    progress(rounds.repeats * len(starts), rounds.repeats * len(starts))
    return [_rate(of_one) for of_one in repeats]


_Repeat = tuple[int, float, float, float]  # images, seconds, processor seconds, MiB


def _repeat(start: Start, rounds: Rounds) -> _Repeat:
    batches = start()
    try:
        _take(batches, 0)
        _take(batches, rounds.warmup_s)
        cpu_before_s = cpu_seconds()
        images, seconds = _take(batches, rounds.repeat_s)
        return images, seconds, cpu_seconds() - cpu_before_s, memory_mib()
    finally:
        if isinstance(batches, Generator):
            batches.close()


def _rate(repeats: Sequence[_Repeat]) -> Rate:
    images, seconds, cpu_s, memory = zip(*repeats, strict=True)
    rates = tuple(map(truediv, images, seconds))
    return Rate(rates, sum(cpu_s) / sum(images), sum(images), sum(seconds), max(memory))


def _take(batches: Iterator[int], least_s: float) -> tuple[int, float]:
    """Take batches for at least `least_s` seconds. Returns the number of images and the seconds."""
    images = 0
    began = time.perf_counter()
    for count in batches:
        images += count
        seconds = time.perf_counter() - began
        if seconds >= least_s:
            return images, seconds
    raise RuntimeError(f"the iterator ended after {images} images; an iterator to measure must not end")


def cpu_seconds() -> float:
    """Processor seconds (user and system) of this process and its descendants, ended children included."""
    return sum(_of_family(lambda process: sum(process.cpu_times()[:4])))


def memory_mib() -> float:
    """Memory in MiB of this process and its descendants; shared memory counts once (proportional set size).

    Pages of files, such as libraries, do not count, since other processes may share them.
    """
    return sum(_of_family(_private_and_shared_kib)) / 1024


def _private_and_shared_kib(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()  # psutil counts pages of files too
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def open_files() -> int:
    """Number of open file descriptors of this process and its descendants."""
    return sum(_of_family(lambda process: int(process.num_fds())))


def require_images(found: int, batch: int, root: Path, key: str = "--batch") -> None:
    """Raise a `UserError` if a dataset has fewer images than a batch."""
    if found < batch:
        raise UserError(f"{root} has {found} images, fewer than {key} = {batch}: use more images or a smaller batch")


@contextmanager
def limited_to_cores(count: int) -> Generator[None]:
    """Restrict this process, its threads and its descendants to `count` of its cores.

    Raises:
        ValueError: this process may use fewer cores.
    """
    allowed = os.sched_getaffinity(0)
    if not 1 <= count <= len(allowed):
        raise ValueError(f"{count} cores asked for; this process may use {len(allowed)}")
    _set_cores(set(sorted(allowed)[:count]))
    try:
        yield
    finally:
        _set_cores(allowed)


def _set_cores(cores: set[int]) -> None:
    # Existing threads and processes keep their cores if only the main thread changes; new ones inherit its cores.
    for thread in chain.from_iterable(_of_family(lambda process: process.threads())):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def _of_family(ask: Callable[[psutil.Process], T]) -> list[T]:
    """Results of `ask` for this process and its descendants, except those that end meanwhile."""
    this = psutil.Process()
    answers = []
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            answers.append(ask(process))
    return answers

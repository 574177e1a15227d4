"""How fast an iterator hands over images, and at what cost in processor time."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond, the tenth is on the safe side.
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Mean of independent repeats and its 95 % interval (Student's t).

    Raises:
        ValueError: for fewer than two, which have no interval.
    """
    if len(values) < 2:
        raise ValueError(f"repeats is {len(values)}; an interval needs at least 2")
    mean = statistics.fmean(values)
    quantile = _T_975[min(len(values) - 1, len(_T_975)) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Rate:
    """Source images per second in timed repeats of one run.

    Attributes:
        images_per_s: one rate for each repeat, at least two.
        cpu_s_per_image: processor seconds of this process and all below it, over all repeats.
        images: how many images the repeats took in all.
        seconds: how long the repeats took in all.
        memory_mib: of this process and all below it at the end of a repeat, the largest: what is shared counts once.
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
    def median(self) -> float:
        """Median over the repeats, source images/s."""
        return statistics.median(self.images_per_s)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, source images/s."""
        interval = interval_of_mean(self.images_per_s)
        return interval.low, interval.high

    @property
    def cores_busy(self) -> float:
        """Processor seconds per second."""
        return self.cpu_s_per_image * self.images / self.seconds

    def over(self, other: Rate) -> Interval:
        """How many times as fast as `other`, from rounds in which both took their turn.

        The geometric mean of the rounds' ratios: a machine that is slower in one round is slower for both.
        """
        logs = [math.log(a / b) for a, b in zip(self.images_per_s, other.images_per_s, strict=True)]
        interval = interval_of_mean(logs)
        return Interval(math.exp(interval.mean), math.exp(interval.low), math.exp(interval.high))


Start = Callable[[], Iterator[int]]
"""Makes an endless iterator; each item is the number of source images in a batch just handed over."""


def measure(start: Start, *, warmup_s: float = 2.0, repeat_s: float = 2.0, repeats: int = 5) -> Rate:
    """Time one endless iterator in its steady state; see `measure_in_rounds`."""
    return measure_in_rounds([start], warmup_s=warmup_s, repeat_s=repeat_s, rounds=repeats)[0]


def measure_in_rounds(
    starts: Sequence[Start],
    *,
    warmup_s: float = 2.0,
    repeat_s: float = 2.0,
    rounds: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rate]:
    """Time endless iterators in their steady state: A B C, A B C, ..., so that all see the same drifting machine.

    Each is started afresh in each round, so that nothing of another works or waits beside it.

    Args:
        starts: makes each iterator.
        warmup_s: discarded, from the first batch on; what comes before it, start-up, is discarded too.
        repeat_s: least length of a repeat, which ends with a batch.
        rounds: at least 2, for an interval.
        progress: told of the repeats done and all there are.

    Raises:
        ValueError: for fewer than two rounds.
        RuntimeError: an iterator ends.
    """
    if rounds < 2:
        raise ValueError(f"repeats is {rounds}; an interval needs at least 2")
    repeats: list[list[_Repeat]] = [[] for _ in starts]
    for number in range(rounds):
        for place, start in enumerate(starts):
            progress(number * len(starts) + place, rounds * len(starts))
            repeats[place].append(_repeat(start, warmup_s, repeat_s))
    progress(rounds * len(starts), rounds * len(starts))
    return [_rate(of_one) for of_one in repeats]


@dataclass(frozen=True)
class _Repeat:
    images: int
    seconds: float
    cpu_s: float
    memory_mib: float


def _repeat(start: Start, warmup_s: float, repeat_s: float) -> _Repeat:
    batches = start()
    try:
        _take(batches, 0)
        _take(batches, warmup_s)
        cpu_before_s = cpu_seconds()
        images, seconds = _take(batches, repeat_s)
        return _Repeat(images, seconds, cpu_seconds() - cpu_before_s, memory_mib())
    finally:
        if isinstance(batches, Generator):
            batches.close()


def _rate(repeats: Sequence[_Repeat]) -> Rate:
    images = sum(repeat.images for repeat in repeats)
    return Rate(
        tuple(repeat.images / repeat.seconds for repeat in repeats),
        sum(repeat.cpu_s for repeat in repeats) / images,
        images,
        sum(repeat.seconds for repeat in repeats),
        max(repeat.memory_mib for repeat in repeats),
    )


def _take(batches: Iterator[int], least_s: float) -> tuple[int, float]:
    """Images handed over in the first batches that take `least_s`, and how long that was in seconds."""
    images = 0
    began = time.perf_counter()
    for count in batches:
        images += count
        seconds = time.perf_counter() - began
        if seconds >= least_s:
            return images, seconds
    raise RuntimeError(f"the iterator ended after {images} images; a measured one must be endless")


def cpu_seconds() -> float:
    """Processor seconds, user and system, of this process and all below it, ended children included."""
    statuses = _statuses()
    return sum(sum(map(int, statuses[pid][11:15])) for pid in _family(statuses)) / _TICKS_PER_S


def memory_mib() -> float:
    """Memory that this process and all below it took; what they share is counted once (proportional set size).

    Pages of files, which programs and libraries are, do not count: how much of them is ours depends on what else runs.
    """
    total_kib = 0
    for pid in _family(_statuses()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total_kib / 1024


def open_files() -> int:
    """Open file descriptors of this process and all below it."""
    total = 0
    for pid in _family(_statuses()):
        try:
            total += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  a path object for each would be waste
        except OSError:  # it has ended meanwhile
            continue
    return total


@contextmanager
def limited_to_cores(count: int) -> Generator[None]:
    """Keep this process, its threads and all below it on `count` of the cores that it may use now.

    Raises:
        ValueError: there are not that many.
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
    # Threads and processes that exist do not follow a change of the main thread; new ones inherit it.
    for pid in _family(_statuses()):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:
                continue


def _statuses() -> dict[int, list[str]]:
    """Fields of /proc/PID/stat after the command's name, which may hold spaces: state, parent, ..."""
    statuses = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            statuses[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return statuses


def _family(statuses: dict[int, list[str]]) -> list[int]:
    """This process and all below it."""
    family = [os.getpid()]
    for parent in family:  # grows while it is walked
        family.extend(pid for pid, fields in statuses.items() if int(fields[1]) == parent)
    return family

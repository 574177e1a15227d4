"""How fast an iterator hands over images, and at what cost in processor time."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond, the tenth is on the safe side.
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Rate:
    """Source images per second in timed repeats of one run.

    Attributes:
        images_per_s: one rate for each repeat, at least two.
        cpu_s_per_image: processor seconds of this process and all below it, over all repeats.
        images: how many images the repeats took in all.
    """

    images_per_s: tuple[float, ...]
    cpu_s_per_image: float
    images: int

    @property
    def mean(self) -> float:
        """Mean over the repeats, source images/s."""
        return statistics.fmean(self.images_per_s)

    @property
    def median(self) -> float:
        """Median over the repeats, source images/s."""
        return statistics.median(self.images_per_s)

    @property
    def half_interval(self) -> float:
        """Half the width of the 95 % interval of the mean (Student's t), source images/s."""
        count = len(self.images_per_s)
        quantile = _T_975[min(count - 1, len(_T_975)) - 1]
        return quantile * statistics.stdev(self.images_per_s) / math.sqrt(count)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, source images/s."""
        return self.mean - self.half_interval, self.mean + self.half_interval


def measure(
    start: Callable[[], Iterator[int]], *, warmup_s: float = 3.0, repeat_s: float = 2.0, repeats: int = 5
) -> Rate:
    """Time an endless iterator in its steady state.

    Args:
        start: makes the iterator; each item is the number of source images in a batch just handed over.
        warmup_s: discarded first, start-up included; the iterator hands over at least one batch in it.
        repeat_s: least length of a repeat, which ends with a batch.
        repeats: at least 2, for an interval.

    Raises:
        ValueError: for fewer than two repeats.
        RuntimeError: the iterator ends.
    """
    if repeats < 2:
        raise ValueError(f"repeats is {repeats}; an interval needs at least 2")
    batches = start()
    try:
        _take(batches, warmup_s)
        cpu_before_s = cpu_seconds()
        counted = [_take(batches, repeat_s) for _ in range(repeats)]
        cpu_s = cpu_seconds() - cpu_before_s
    finally:
        if isinstance(batches, Generator):
            batches.close()
    images = sum(count for count, _ in counted)
    return Rate(tuple(count / seconds for count, seconds in counted), cpu_s / images, images)


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

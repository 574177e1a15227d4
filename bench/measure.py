"""Measures how many images a loader makes per second, and the processor time that it takes."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from peclr_dali.train.pose.metrics import Interval, interval_of_mean

Start = Callable[[], Generator[int]]
"""Makes an endless generator; each item is the number of source images in a finished batch."""

Progress = Callable[[int, int], None]
"""Called with the number of repeats done and the number of all repeats."""


class Repeat(NamedTuple):
    """One timed repeat: source images, seconds, and processor seconds of this process and its descendants."""

    images: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Rate:
    """Source images per second in timed repeats of one run, at least two."""

    repeats: Sequence[Repeat]

    @property
    def images_per_s(self) -> list[float]:
        """One rate for each repeat."""
        return [repeat.images / repeat.seconds for repeat in self.repeats]

    @property
    def cores_busy(self) -> float:
        """Mean number of busy cores: processor seconds per second."""
        return sum(repeat.cpu_s for repeat in self.repeats) / sum(repeat.seconds for repeat in self.repeats)

    def as_row(self) -> dict[str, Any]:
        """The figures for a row of bench/results/."""
        images = sum(repeat.images for repeat in self.repeats)
        mean, low, high = interval_of_mean(self.images_per_s)
        return {
            "images_per_s": round(mean, 1),
            "interval": [round(low, 1), round(high, 1)],
            "repeats": [round(value, 1) for value in self.images_per_s],
            "cpu_ms_per_image": round(sum(repeat.cpu_s for repeat in self.repeats) / images * 1e3, 3),
            "cores_busy": round(self.cores_busy, 2),
            "images": images,
        }

    def over(self, other: "Rate") -> Interval:
        """How many times as fast as `other`, from rounds in which both were measured.

        This is the geometric mean of the rounds' ratios, since a slow round of the machine slows down both.
        """
        logs = [math.log(a / b) for a, b in zip(self.images_per_s, other.images_per_s, strict=True)]
        return Interval(*map(math.exp, interval_of_mean(logs)))


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How long to measure."""

    repeats: int  # rounds; each times everything once. At least 2, for an interval
    repeat_s: float  # minimum length of a repeat, which ends with a batch
    warmup_s: float = 2.0  # after the first batch, not measured. The start-up is not measured either


def measure_in_rounds(starts: Sequence[Start], rounds: Rounds, progress: Progress) -> list[Rate]:
    """Time endless generators in their steady state, in turn: A B C, A B C, ..., so that a drift affects all of them.

    Each round starts each of them again. Only one runs at a time.
    """
    repeats: list[list[Repeat]] = [[] for _ in starts]
    total = rounds.repeats * len(starts)
    for number in range(total):
        progress(number, total)
        with closing(starts[number % len(starts)]()) as batches:
            _take(batches, 0)
            _take(batches, rounds.warmup_s)
            cpu_before_s = cpu_seconds()
            images, seconds = _take(batches, rounds.repeat_s)
            repeats[number % len(starts)].append(Repeat(images, seconds, cpu_seconds() - cpu_before_s))
    progress(total, total)
    return [Rate(timed) for timed in repeats]


def _take(batches: Generator[int], least_s: float) -> tuple[int, float]:
    """Take batches for at least `least_s` seconds. Returns the number of images and the seconds."""
    began_s = time.perf_counter()
    images = next(batches)
    while (seconds := time.perf_counter() - began_s) < least_s:
        images += next(batches)
    return images, seconds


def cpu_seconds() -> float:
    """Processor seconds (user and system) of this process and its descendants, ended children included."""
    root, cpu_s = psutil.Process(), 0.0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error, OSError):  # it ended meanwhile
            cpu_s += sum(process.cpu_times()[:4])
    return cpu_s

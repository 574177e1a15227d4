"""The loader for an hour: does its memory grow, does it leave files open?"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

from bench.loaders.ours import LoaderSettings, our_batches, require_enough
from bench.measure import Progress, limited_to_cores, memory_mib, no_progress, open_files
from bench.rows import data_tables, describe_machine
from pipelines.sources import load_index
from train.config.pretraining import Config

SETTLED_AFTER_S = 60.0
"""What the loader holds then is what it should hold at the end; of a shorter soak, half of it is for settling."""

MEMORY_MAY_GROW = 0.02
"""As a share of what was held after settling."""

_LAG_S = 3.0
"""How long the first batch is held: the loader then works ahead as far as it may, as behind a training step, and holds
all that it ever will. A consumer that only counts would come to that by accident, whenever it is held up."""

_WINDOW = 5
_SAMPLES = 600


@dataclass(frozen=True)
class Held:
    """What the process and all below it held at one moment, `at_s` after the first batch."""

    at_s: float
    memory_mib: float
    open_files: int


@dataclass(frozen=True)
class Soak:
    """What a soak found.

    Attributes:
        seconds: how long the loader ran.
        images: how many it made.
        history: what was held, evenly spread over the run.
        settled: the median of what was held just after settling.
        end: the median of what was held last.
    """

    seconds: float
    images: int
    history: tuple[Held, ...]
    settled: Held
    end: Held

    @property
    def memory_growth(self) -> float:
        """From settled to end, as a share of settled; negative if it shrank."""
        return self.end.memory_mib / self.settled.memory_mib - 1

    @property
    def steady(self) -> bool:
        """Whether memory stayed within `MEMORY_MAY_GROW`, and no more files are open than before."""
        return abs(self.memory_growth) <= MEMORY_MAY_GROW and self.end.open_files <= self.settled.open_files


def soak(config: Config, settings: LoaderSettings, seconds: float, progress: Progress = no_progress) -> Soak:
    """Run the loader for `seconds` from its first batch on, and look at what the process holds meanwhile.

    Raises:
        UserError: the data cannot be used, or has fewer images than a batch.
    """
    index = load_index(config.data)
    require_enough(index, settings)
    gc.freeze()  # as pretraining does
    history: list[Held] = []
    images, every_s = 0, seconds / _SAMPLES
    with limited_to_cores(settings.cores):
        batches = our_batches(index, config, settings.batch)
        next(batches)
        time.sleep(_LAG_S)
        began = time.perf_counter()
        for count in batches:
            images += count
            at_s = time.perf_counter() - began
            if at_s >= len(history) * every_s:
                history.append(Held(at_s, memory_mib(), open_files()))
                progress(round(at_s), round(seconds))
            if at_s >= seconds:
                break
        batches.close()
    settled_s = min(SETTLED_AFTER_S, seconds / 2)
    settled = [held for held in history if held.at_s >= settled_s]
    return Soak(at_s, images, tuple(history), _median(settled[:_WINDOW]), _median(settled[-_WINDOW:]))


def _median(held: list[Held]) -> Held:
    return Held(
        statistics.median(one.at_s for one in held),
        statistics.median(one.memory_mib for one in held),
        round(statistics.median(one.open_files for one in held)),
    )


def summary(found: Soak) -> str:
    """One sentence."""
    what = (
        f"{found.seconds / 60:.0f} minutes, {found.images} images: memory {found.settled.memory_mib:.0f} MiB after "
        f"{found.settled.at_s:.0f} s and {found.end.memory_mib:.0f} MiB at the end ({found.memory_growth:+.1%}), open "
        f"files {found.settled.open_files} and {found.end.open_files}"
    )
    return what if found.steady else f"{what}; expected memory within {MEMORY_MAY_GROW:.0%} and no more files"


def as_json(found: Soak, config: Config, settings: LoaderSettings) -> dict[str, Any]:
    """A row of bench/results/; of the history, one moment in ten."""
    return {
        "bench": "soak",
        "machine": describe_machine(),
        "settings": {"cores": settings.cores, "batch": settings.batch},
        "config": data_tables(config),
        "seconds": round(found.seconds, 1),
        "images": found.images,
        "images_per_s": round(found.images / found.seconds, 1),
        "memory_growth": round(found.memory_growth, 5),
        "steady": found.steady,
        "history": [[round(held.at_s), round(held.memory_mib, 1), held.open_files] for held in found.history[::10]],
    }

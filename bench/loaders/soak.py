"""The loader for an hour: does its memory grow, does it leave files open?"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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


def soak(config: Config, settings: LoaderSettings, seconds: float, progress: Progress = no_progress) -> dict[str, Any]:
    """Run the loader for `seconds` from its first batch on, and look at what the process holds meanwhile.

    Returns:
        A row of bench/results/. "settled" and "end" are the medians just after settling and at the end of what all
        processes held: seconds since the first batch, MiB, open files; "history" is one moment in ten of all.

    Raises:
        UserError: the data cannot be used, or has fewer images than a batch.
    """
    index = load_index(config.data)
    require_enough(index, settings)
    gc.freeze()  # as pretraining does
    history: list[tuple[float, float, int]] = []
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
                history.append((at_s, memory_mib(), open_files()))
                progress(round(at_s), round(seconds))
            if at_s >= seconds:
                break
        batches.close()
    settled_s = min(SETTLED_AFTER_S, seconds / 2)
    after_settling = [held for held in history if held[0] >= settled_s]
    return {
        "bench": "soak",
        "machine": describe_machine(),
        "settings": {"cores": settings.cores, "batch": settings.batch},
        "config": data_tables(config),
        "seconds": round(at_s, 1),
        "images": images,
        "images_per_s": round(images / at_s, 1),
        **judge(*(np.median(held, axis=0).tolist() for held in (after_settling[:_WINDOW], after_settling[-_WINDOW:]))),
        "history": [[round(at_s), round(mib, 1), files] for at_s, mib, files in history[::10]],
    }


def judge(settled: Sequence[float], end: Sequence[float]) -> dict[str, Any]:
    """Whether memory stayed within `MEMORY_MAY_GROW`, and no more files are open than before.

    Args:
        settled: seconds, MiB and open files, just after settling.
        end: likewise, at the end.
    """
    growth = float(end[1] / settled[1] - 1)
    return {
        "memory_growth": round(growth, 5),
        "steady": bool(abs(growth) <= MEMORY_MAY_GROW and round(end[2]) <= round(settled[2])),
        "settled": [round(value) for value in settled],
        "end": [round(value) for value in end],
    }


def summary(row: Mapping[str, Any]) -> str:
    """One sentence."""
    (at_s, before_mib, before_files), (_, mib, files) = row["settled"], row["end"]
    what = (
        f"{row['seconds'] / 60:.0f} minutes, {row['images']} images: memory {before_mib:.0f} MiB after {at_s:.0f} s "
        f"and {mib:.0f} MiB at the end ({row['memory_growth']:+.1%}), open files {before_files} and {files}"
    )
    return what if row["steady"] else f"{what}; expected memory within {MEMORY_MAY_GROW:.0%} and no more files"

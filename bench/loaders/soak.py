"""Runs the loader for a long time, and checks whether its memory or its number of open files grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bench.loaders.ours import CPU, LoaderSettings, load_enough, our_batches
from bench.measure import Progress, limited_to_cores, memory_mib, no_progress, open_files
from bench.rows import data_tables, describe_machine
from train.config.pretraining import Config

SETTLED_AFTER_S = 60.0
"""Seconds until the memory should have settled; half of the soak if that is shorter."""

MEMORY_MAY_GROW = 0.02
"""Largest growth, as a share of the settled memory."""

_LAG_S = 3.0
"""Seconds for which the first batch is held. Meanwhile the loader works ahead as far as it can and takes all the memory
that it will ever need."""

_WINDOW = 5
_SAMPLES = 600


def soak(
    config: Config,
    settings: LoaderSettings,
    seconds: float,
    progress: Progress = no_progress,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Run the loader for `seconds` from its first batch on, and sample memory and open files.

    Returns:
        A row of bench/results/. "settled" and "end" are medians over samples just after settling and at the end:
        seconds since the first batch, MiB and open files of all processes. "history" is every tenth sample.
    """
    index = load_enough(config, settings)
    gc.freeze()  # as pre-training does
    history: list[tuple[float, float, int]] = []
    images, every_s = 0, seconds / _SAMPLES
    with limited_to_cores(settings.cores):
        batches = our_batches(index, config, settings.batch, device)
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
        "device": str(device),
        "settings": {"cores": settings.cores, "batch": settings.batch},
        "config": data_tables(config),
        "seconds": round(at_s, 1),
        "images": images,
        "images_per_s": round(images / at_s, 1),
        **judge(*(np.median(held, axis=0).tolist() for held in (after_settling[:_WINDOW], after_settling[-_WINDOW:]))),
        "history": [[round(at_s), round(mib, 1), files] for at_s, mib, files in history[::10]],
    }


def judge(settled: Sequence[float], end: Sequence[float]) -> dict[str, Any]:
    """Whether memory changed by at most `MEMORY_MAY_GROW`, and the number of open files did not grow.

    `settled` and `end` hold seconds, MiB and the number of open files.
    """
    growth = float(end[1] / settled[1] - 1)
    return {
        "memory_growth": round(growth, 5),
        "steady": bool(abs(growth) <= MEMORY_MAY_GROW and round(end[2]) <= round(settled[2])),
        "settled": [round(value) for value in settled],
        "end": [round(value) for value in end],
    }


def summary(row: Mapping[str, Any]) -> str:
    """The row in one sentence."""
    (at_s, before_mib, before_files), (_, mib, files) = row["settled"], row["end"]
    what = (
        f"{row['seconds'] / 60:.0f} minutes, {row['images']} images: memory {before_mib:.0f} MiB after {at_s:.0f} s "
        f"and {mib:.0f} MiB at the end ({row['memory_growth']:+.1%}), open files {before_files} and {files}"
    )
    return what if row["steady"] else f"{what}; expected memory within {MEMORY_MAY_GROW:.0%} and no more files"

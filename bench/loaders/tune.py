"""Finds the loader's fastest settings on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import tomli_w
import torch

from bench.loaders.ours import LoaderSettings, load_enough, our_batches, thread_counts
from bench.measure import Progress, Rate, Rounds, Start, limited_to_cores, measure_in_rounds, no_progress
from pipelines.config import PipelinesConfig
from pipelines.render.backends import resolve_backend
from train.config.pretraining import Config

_ROUNDS = 3


def tune(
    config: Config, settings: LoaderSettings, device: torch.device, progress: Progress = no_progress
) -> tuple[dict[str, Any], Rate]:
    """Try the values of one key after the other, each with the best values of the keys before.

    A larger value is taken only if it is faster and the interval of their ratio excludes 1.

    Returns:
        The best values of the keys of `pipelines` that were tried, and their rate in the last comparison.
    """
    index = load_enough(config, settings)

    def start(pipelines: PipelinesConfig) -> Start:
        changed = dataclasses.replace(config, pipelines=pipelines)
        return lambda: our_batches(index, changed, settings.batch, device)

    tried = _values(settings, config, device)
    total = sum(len(values) for values in tried.values()) * _ROUNDS
    rounds = Rounds(repeats=_ROUNDS, repeat_s=settings.repeat_s / 2, warmup_s=settings.warmup_s / 2)
    best: dict[str, Any] = {}
    done = 0
    with limited_to_cores(settings.cores):
        for key, values in tried.items():
            starts = [start(dataclasses.replace(config.pipelines, **best, **{key: value})) for value in values]
            rates = measure_in_rounds(starts, rounds, lambda now, _, done=done: progress(done + now, total))  # type: ignore[misc]
            done += len(values) * _ROUNDS
            best[key] = values[fastest(rates)]
    return best, rates[fastest(rates)]


def _values(settings: LoaderSettings, config: Config, device: torch.device) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {
        "threads": thread_counts(settings.cores),
        "batch": [size for size in (32, 64, 128, 256) if size <= settings.batch] or [settings.batch],
        "prefetch": [1, 2, 4],
    }
    if device.type == "cuda" and resolve_backend(config.pipelines.backend, device) == "dali":
        values["hw_decoder_load"] = [0.0, 0.4, 0.65, 0.8, 0.9]
    return values


def fastest(rates: list[Rate]) -> int:
    """Index of the first rate that no other exceeds by more than the interval of their ratio."""
    best = 0
    for place, rate in enumerate(rates):
        if rate.over(rates[best]).low > 1:
            best = place
    return best


def as_toml(values: dict[str, Any], rate: Rate) -> str:
    """The table to paste into a configuration."""
    return f"# {rate.mean:.0f} images/s on this machine\n" + tomli_w.dumps({"pipelines": values})

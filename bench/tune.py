"""Which of the loader's settings are fastest on this machine?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w
import torch

from bench.loader import Settings, check, our_batches, thread_counts
from bench.measure import Rate, limited_to_cores, measure_in_rounds
from pipelines.config import PipelinesConfig
from pipelines.render.backends import resolve_backend
from pipelines.sources import load_index
from train.config.pretraining import Config

_ROUNDS = 3


@dataclass(frozen=True)
class Tuned:
    """The settings to use.

    Attributes:
        pipelines: the best settings found.
        keys: those that were tried.
        rate: of the best, in the last comparison.
        before: of the settings that were given, in the first.
    """

    pipelines: PipelinesConfig
    keys: tuple[str, ...]
    rate: Rate
    before: Rate


def tune(
    config: Config,
    settings: Settings,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Try the values of one key after the other, each with the best of those before.

    A value replaces the one before it only if it is faster beyond the interval of their ratio: of two that are as
    good, the smaller, which comes first, stays.
    """
    index = load_index(config.data)
    check(index, settings)
    ladder = _values(settings, config, device)
    total = sum(len(values) for _, values in ladder) * _ROUNDS
    best, done, before, rate = config.pipelines, 0, None, None
    with limited_to_cores(settings.cores):
        for key, values in ladder:
            tried = [dataclasses.replace(best, **{key: value}) for value in values]
            rates = measure_in_rounds(
                [_start(config, pipelines, settings, device) for pipelines in tried],
                warmup_s=settings.warmup_s / 2,
                repeat_s=settings.repeat_s / 2,
                rounds=_ROUNDS,
                progress=lambda now, _, done=done: progress(done + now, total),  # type: ignore[misc]
            )
            done += len(values) * _ROUNDS
            place = fastest(rates)
            best, rate = tried[place], rates[place]
            before = before or rates[-1]
    assert rate is not None and before is not None  # noqa: PT018
    return Tuned(best, tuple(key for key, _ in ladder), rate, before)


def _values(settings: Settings, config: Config, device: torch.device) -> list[tuple[str, list[Any]]]:
    ladder: list[tuple[str, list[Any]]] = [
        ("threads", thread_counts(settings.cores)),
        ("batch", [size for size in (32, 64, 128, 256) if size <= settings.batch]),
        ("prefetch", [1, 2, 4]),
    ]
    if device.type == "cuda" and resolve_backend(config.pipelines.backend, device) == "dali":
        ladder.append(("hw_decoder_load", [0.0, 0.4, 0.65, 0.8, 0.9]))
    return ladder


def _start(config: Config, pipelines: PipelinesConfig, settings: Settings, device: torch.device) -> Any:
    index = load_index(config.data)
    changed = dataclasses.replace(config, pipelines=pipelines)
    return lambda: our_batches(index, changed, settings.batch, device)


def fastest(rates: list[Rate]) -> int:
    """Place of the first that no other beats beyond the interval of their ratio."""
    best = 0
    for place, rate in enumerate(rates):
        if rate.over(rates[best]).low > 1:
            best = place
    return best


def as_toml(tuned: Tuned) -> str:
    """The table to paste into a configuration."""
    keys = {key: getattr(tuned.pipelines, key) for key in tuned.keys}
    return f"# {tuned.rate.mean:.0f} images/s on this machine\n" + tomli_w.dumps({"pipelines": keys})

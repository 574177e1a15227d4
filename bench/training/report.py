"""What `bench-train` found, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.measure import Interval, Rate, interval_of_mean
from bench.rows import describe_machine
from bench.training.step import StepFigures, StepSettings
from train.config.pretraining import Config
from train.config.tables import to_dict


def _span(interval: Interval, digits: int) -> str:
    return f"{interval.mean:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def _rate(rate: Rate) -> str:
    return _span(interval_of_mean(rate.images_per_s), 1)


def _overhead(figures: StepFigures, slower: str, than: str) -> str:
    rates = figures.rates
    return f"{_span(rates[than].over(rates[slower]), 2)} x" if {slower, than} <= rates.keys() else "not measured"


_LINES: Final[Mapping[str, Callable[[StepFigures], str]]] = {
    "step, batches at hand (s)": lambda one: _span(one.step_s, 3),
    "images/s, batches at hand": lambda one: _rate(one.rates["cached"]),
    "images/s, with the loader": lambda one: _rate(one.rates["loaded"]),
    "waited for the loader": lambda one: f"{one.waited_share:.2%}",
    "slower with the loader": lambda one: f"{one.loader_share:.1%}",
    "optimiser's share": lambda one: f"{one.optimizer_share:.1%}",
    "model TFLOP/s": lambda one: f"{one.flop_per_s / 1e12:.3f}",
    "GFLOP per image, two views": lambda one: f"{one.flop_per_image / 1e9:.2f}",
    "peak memory (MiB)": lambda one: f"{one.peak_memory_mib:.0f}",
    "in use on the device (MiB)": lambda one: "-" if one.device_memory_mib is None else f"{one.device_memory_mib:.0f}",
    "exact gradient: recompute": lambda one: one.recompute,
    "exact batch over plain step": lambda one: _overhead(one, "cached", "plain"),
    "exact batch over averaged small ones": lambda one: _overhead(one, "cached", "averaged"),
    "recomputed over averaged small ones": lambda one: _overhead(one, "recomputed", "averaged"),
}


def as_table(figures: Sequence[StepFigures]) -> Table:
    """A column for each precision."""
    first = figures[0]
    table = Table(
        title=f"{first.device}: batches of {first.batch} in micro-batches of {first.micro_batch}, 95 % intervals",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for one in figures:
        table.add_column(one.precision, justify="right", no_wrap=True)
    for name, cell in _LINES.items():
        table.add_row(name, *map(cell, figures))
    return table


def as_json(figures: Sequence[StepFigures], config: Config, settings: StepSettings) -> dict[str, Any]:
    """A row of bench/results/."""
    return {
        "bench": "train",
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
        "config": to_dict(config),
        "precisions": [_entry(one) for one in figures],
    }


def _entry(one: StepFigures) -> dict[str, Any]:
    return {
        "precision": one.precision,
        "device": one.device,
        "batch": one.batch,
        "micro_batch": one.micro_batch,
        "recompute": one.recompute,
        "step_s": [round(edge, 5) for edge in astuple(one.step_s)],
        "images_per_s": {
            name: {
                "mean": round(rate.mean, 2),
                "interval": [round(edge, 2) for edge in rate.interval],
                "repeats": [round(value, 2) for value in rate.images_per_s],
            }
            for name, rate in one.rates.items()
        },
        "waited_share": round(one.waited_share, 5),
        "loader_share": round(one.loader_share, 4),
        "optimizer_share": round(one.optimizer_share, 4),
        "flop_per_image": round(one.flop_per_image),
        "model_flop_per_s": round(one.flop_per_s),
        "peak_memory_mib": round(one.peak_memory_mib),
        "device_memory_mib": None if one.device_memory_mib is None else round(one.device_memory_mib),
    }

"""Shows the result of `bench-train` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.measure import Rate
from bench.rows import describe_machine
from bench.training.step import Row, StepSettings
from train.config.pretraining import Config
from train.config.tables import to_dict


def _span(interval: Sequence[float], digits: int) -> str:
    mean, low, high = interval
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _rate(one: Row, way: str) -> str:
    rate = one["images_per_s"][way]
    return _span([rate["mean"], *rate["interval"]], 1)


def _overhead(one: Row, slower: str, than: str) -> str:
    rates = {way: Rate(tuple(rate["repeats"]), math.nan, 0) for way, rate in one["images_per_s"].items()}
    if not {slower, than} <= rates.keys():
        return "not measured"
    return f"{_span(rates[than].over(rates[slower]), 2)} x"


FIGURES: Final[Mapping[str, Callable[[Row], str]]] = {
    "step, batches at hand (s)": lambda one: _span(one["step_s"], 3),
    "images/s, batches at hand": lambda one: _rate(one, "cached"),
    "images/s, with the loader": lambda one: _rate(one, "loaded"),
    "waited for the loader": lambda one: f"{one['waited_share']:.2%}",
    "slower with the loader": lambda one: f"{one['loader_share']:.1%}",
    "optimiser's share": lambda one: f"{one['optimizer_share']:.1%}",
    "model TFLOP/s": lambda one: f"{one['model_flop_per_s'] / 1e12:.3f}",
    "GFLOP per image, two views": lambda one: f"{one['flop_per_image'] / 1e9:.2f}",
    "peak memory (MiB)": lambda one: f"{one['peak_memory_mib']:.0f}",
    "in use on the device (MiB)": lambda one: (
        "-" if one["device_memory_mib"] is None else f"{one['device_memory_mib']:.0f}"
    ),
    "exact gradient: recompute": lambda one: one["recompute"],
    "exact batch over plain step": lambda one: _overhead(one, "cached", "plain"),
    "exact batch over averaged small ones": lambda one: _overhead(one, "cached", "averaged"),
    "recomputed over averaged small ones": lambda one: _overhead(one, "recomputed", "averaged"),
}
"""The lines of the table: heading, and the text made from an entry."""


def as_table(figures: Sequence[Row]) -> Table:
    """A table with a column for each precision."""
    first = figures[0]
    batches = f"batches of {first['batch']} in micro-batches of {first['micro_batch']}"
    table = Table(title=f"{first['device']}: {batches}, 95 % intervals", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for one in figures:
        table.add_column(one["precision"], justify="right", no_wrap=True)
    for name, cell in FIGURES.items():
        table.add_row(name, *map(cell, figures))
    return table


def as_json(figures: Sequence[Row], config: Config, settings: StepSettings) -> Row:
    """A row of bench/results/."""
    return {
        "bench": "train",
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
        "config": to_dict(config),
        "precisions": list(figures),
    }

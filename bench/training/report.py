"""The figures of `bench-train` as lines of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from peclr_dali.bench.measure import Rate
from peclr_dali.bench.rows import Row


def _span(interval: Sequence[float], digits: int) -> str:
    mean, low, high = interval
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _rate(one: Row, way: str) -> str:
    rate = one["images_per_s"][way]
    return _span([rate["mean"], *rate["interval"]], 1)


def _over_averaged(one: Row) -> str:
    cached, averaged = (Rate(tuple(one["images_per_s"][way]["repeats"]), math.nan, 0) for way in ("cached", "averaged"))
    return f"{_span(averaged.over(cached), 2)} x"


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
    "exact batch over averaged small ones": _over_averaged,
}
"""The lines of the table: heading, and the text made from the figures of a precision."""


def lines(row: Row) -> Iterator[tuple[str, ...]]:
    """Lines of a row of `bench-train`: the heading, then a cell for each precision."""
    return ((name, *map(cell, row["precisions"])) for name, cell in FIGURES.items())

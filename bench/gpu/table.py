"""The rows of `bench-gpu`, and their table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.rows import Row
from bench.training.report import lines

_OTHERS_SHARE: Final = 0.25
"""Share of a card's memory that torch leaves to DALI, the libraries and the driver's context."""


def limited(card_bytes: float | None, total_bytes: float) -> dict[str, str]:
    """The environment of a process whose torch takes its part of a smaller card's memory; unchanged for None."""
    if card_bytes is None:
        return dict(os.environ)
    share = min(1.0, card_bytes * (1 - _OTHERS_SHARE) / total_bytes)
    return {**os.environ, "PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{share:.4f}"}


def row_of(overlay: str, train: Row, loader: Row) -> dict[str, Any]:
    """The row of an overlay, from those of `bench-train` and `bench-loader`."""
    return {
        "bench": "gpu",
        "machine": train["machine"],
        "overlay": overlay,
        "encoder": train["config"]["encoder"]["name"],
        "precisions": train["precisions"],
        "loader_images_per_s": loader["loaders"][0]["images_per_s"],
        "verdict": loader["verdict"],
    }


def table_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Lines of a table of rows: the heading, then a cell for each row."""
    steps = [row["precisions"][0] for row in rows]
    yield ("precision", *(one["precision"] for one in steps))
    yield from lines({"precisions": steps})
    yield ("loader alone, images/s", *(f"{row['loader_images_per_s']:.0f}" for row in rows))
    ratios = [
        row["loader_images_per_s"] / one["images_per_s"]["cached"]["mean"] for row, one in zip(rows, steps, strict=True)
    ]
    yield ("loader alone over step", *(f"{ratio:.2f} x" for ratio in ratios))

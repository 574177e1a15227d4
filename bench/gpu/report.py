"""The figures of `bench-gpu --estimate` as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from peclr_dali.bench.rows import Row

HEADS: Final = (
    "", "card", "graphs kept", "peak GiB", "held GiB", "kernels", "TFLOP", "GB moved", "computed time (s)",
    "over all kept", "products", "of peak",
)  # fmt: skip

EXPLAINED: Final = (
    "All is counted but for the time, which is computed; nothing was timed on a card. Over all "
    "kept: this time over that of a card whose memory keeps all graphs. Products: the share of this time "
    "that convolutions and products of matrices take. Of peak: operations over this time and the card's 16-bit peak."
)


def lines(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Lines of a table of `HEADS`."""
    for row in rows:
        likely, best, worst = row["computed_s"]
        yield (
            f"{row['configuration']}, {row['precision']}",
            row["gpu"],
            f"{row['graphs_kept']} of {row['graphs']}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            f"{row['held_bytes'] / 2**30:.2f}",
            f"{row['kernels']:,}",
            f"{row['flop'] / 1e12:.1f}",
            f"{row['bytes'] / 1e9:.0f}",
            f"{likely:.2f} ({best:.2f} to {worst:.2f})",
            f"{row['over_all_kept']:.2f} x",
            f"{row['products_share']:.0%}",
            f"{row['peak_share']:.0%}",
        )

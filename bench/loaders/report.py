"""Shows a row of bench-loader as a table and a picture, and compares it with another row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.rows import read_rows
from errors import UserError
from train.pictures import save_figure

_OURS, _PEER, _PART = "#2f6f4f", "#9aa5b1", "#c9a227"

Row = Mapping[str, Any]


def as_tables(row: Row) -> Iterator[Table]:
    """Tables with 95 % intervals: loaders with their ratios, parts of our loader. Then the traffic, if there is any."""
    settings = row["settings"]
    title = (
        f"{settings['cores']} cores, batches of {settings['batch']} on {row['device']}, {settings['repeats']} rounds"
    )
    yield _table(title, row["loaders"])
    title = "parts of this loader, each alone; this loader with other numbers of threads"
    yield _table(title, [*row["stages"], *row["threads"].values()])
    if row.get("network") is not None:
        yield _network_table(row["network"])


def _network_table(network: Row) -> Table:
    table = Table(title="data at an address: reads from the cache, and traffic", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("images", "cache hits", "read directly", "MB", "MB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, key in (("first pass over all images", "first_pass"), ("rounds, everything together", "rounds")):
        found = network[key]
        figures = [f"{found['images']}", f"{found['hit_rate']:.1%}", f"{found['read_directly']}"]
        table.add_row(name, *figures, f"{found['mb']:.1f}", f"{found['mb_per_s']:.1f}")
    return table


def _table(title: str, entries: Sequence[Row]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("images/s (95 %)", "CPU ms/image", "cores busy", "MiB", "ours is"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        low, high = entry["interval"]
        table.add_row(
            entry["name"],
            f"{entry['images_per_s']:.0f} ({low:.0f} to {high:.0f})",
            f"{entry['cpu_ms_per_image']:.3f}",
            f"{entry['cores_busy']:.2f}",
            f"{entry['memory_mib']:.0f}",
            "1" if entry["name"] == "this loader" else "{:.2f} x ({:.2f} to {:.2f})".format(*entry["ours_is"]),
        )
    # One decodes whole images, the other regions: no comparison.
    decoding = [entry for entry in entries if entry["name"] in ("decode only", "decode only (DALI)")]
    table.caption = "\n".join(f"{entry['name']}: {entry['description']}" for entry in decoding) or None
    return table


def save_plot(row: Row, out: Path) -> None:
    """Draw all rates as bars with intervals."""
    threads = row["threads"].values()
    groups = [(row["loaders"][:1], _OURS), (row["loaders"][1:], _PEER), (row["stages"], _PART), (threads, _OURS)]
    entries = [entry for group, _ in groups for entry in group]
    colours = [colour for group, colour in groups for _ in group]
    figure = Figure(figsize=(9, 0.42 * len(entries) + 1.6), layout="constrained")
    axes = figure.subplots()
    means = [entry["images_per_s"] for entry in entries]
    errors = [max(entry["interval"][1] - entry["images_per_s"], 0.0) for entry in entries]
    axes.barh(range(len(entries)), means, xerr=errors, color=colours, error_kw={"lw": 1, "capsize": 2})
    for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
        axes.text(mean + error, place, f"  {mean:.0f}", va="center", fontsize=8)
    if row["step_images_per_s"] is not None:
        axes.axvline(row["step_images_per_s"], color="#b03a2e", linestyle="--", label="rate of a training step")
        axes.legend(loc="lower right", frameon=False)
    axes.set_xscale("log")
    axes.set_xlim(right=max(means) * 2)
    axes.set_yticks(range(len(entries)), [entry["name"] for entry in entries])
    axes.invert_yaxis()
    axes.set_xlabel("source images per second, logarithmic; bars: 95 % interval of the mean")
    axes.set_title(
        f"{row['settings']['cores']} cores, batches of {row['settings']['batch']} on {row['device']}: this loader "
        f"(green), others (grey), its parts alone (yellow)",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(out, figure, dpi=120)


def find_row(place: str) -> Row:
    """A row of bench-loader: FILE, its last row, or FILE:NUMBER, counted from 1. A missing row is a `UserError`."""
    name, colon, number = place.rpartition(":")
    file, wanted = (Path(name), int(number)) if colon and number.isdecimal() else (Path(place), 0)
    rows = [row for row in read_rows(file) if row.get("bench") == "loader" and "machine" in row]
    if not 0 <= wanted <= len(rows) or not rows:
        raise UserError(f"--compare {place}: {file} holds {len(rows)} rows of bench-loader. Name one of its rows.")
    return rows[wanted - 1]


def require_comparable(before: Row, now: Row) -> None:
    """Raise a `UserError` if two rows, or their `conditions`, differ in machine, settings or sources."""
    conditions = [("machine", "cpu"), ("machine", "gpu"), ("settings", "cores"), ("settings", "batch")]
    compared = [(key, before[table][key], now[table][key]) for table, key in conditions]
    compared.append(("sources", before.get("sources", "small"), now.get("sources", "small")))
    made = before["config"].keys() & {"geometry", "colour", "appearance"}  # these change what the loader makes
    compared += [(table, before["config"][table], now["config"][table]) for table in made]
    for name, was, found in compared:
        if was != found:
            raise UserError(f"--compare: the row was measured with {name} = {was!r}, this run with {found!r}")


def regression(before: Row, now: Row) -> str | None:
    """A line if the loader is slower than in a comparable row and the intervals do not overlap; else None."""
    old, new = before["loaders"][0], now["loaders"][0]
    if new["interval"][1] >= old["interval"][0]:
        return None
    return (
        f"slower than the row of {before['machine']['date']} (commit {before['machine']['commit']}): "
        f"{new['images_per_s']:.0f} images/s, interval {new['interval'][0]:.0f} to {new['interval'][1]:.0f}; it was "
        f"{old['images_per_s']:.0f}, {old['interval'][0]:.0f} to {old['interval'][1]:.0f}"
    )

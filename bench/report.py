"""What `bench-loader` found, as a table, as JSON, as pictures; and whether it is slower than another row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.hardware import describe_machine
from bench.loader import Report, Row, Settings
from bench.measure import Interval, Rate
from errors import UserError
from train.config.pretraining import Config
from train.config.tables import to_dict
from train.pictures import save_figure

_OURS, _PEER, _PART = "#2f6f4f", "#9aa5b1", "#c9a227"


def as_tables(report: Report) -> Iterator[Table]:
    """Loaders with their ratios, then the parts of ours; each with its 95 % interval."""
    settings, ours = report.settings, report.ours.rate
    loaders = _table(
        f"{settings.cores} cores, batches of {settings.batch} on {report.device}, {settings.repeats} rounds", "ours is"
    )
    for row in [report.ours, *report.peers]:
        loaders.add_row(*_cells(row), _times(ours.over(row.rate)) if row is not report.ours else "1")
    loaders.caption = _what_is_decoded(report.peers)
    yield loaders
    parts = _table("parts of this loader, each alone; this loader with other numbers of threads", "ours is")
    for row in [*report.stages, *report.threads.values()]:
        parts.add_row(*_cells(row), _times(ours.over(row.rate)))
    parts.caption = _what_is_decoded(report.stages)
    yield parts


def _what_is_decoded(rows: Sequence[Row]) -> str | None:
    """What "decode only" stands for in a table: whole images and regions of them are not comparable."""
    told = [f"{row.name}: {row.description}" for row in rows if row.name in ("decode only", "decode only (DALI)")]
    return "\n".join(told) or None


def _table(title: str, ratio: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("images/s (95 %)", "CPU ms/image", "cores busy", "MiB", ratio):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(row: Row) -> list[str]:
    rate = row.rate
    low, high = rate.interval
    return [
        row.name,
        f"{rate.mean:.0f} ({low:.0f} to {high:.0f})",
        f"{rate.cpu_s_per_image * 1e3:.3f}",
        f"{rate.cores_busy:.2f}",
        f"{rate.memory_mib:.0f}",
    ]


def _times(ratio: Interval) -> str:
    return f"{ratio.mean:.2f} x ({ratio.low:.2f} to {ratio.high:.2f})"


def as_json(report: Report, config: Config, sources: str) -> dict[str, Any]:
    """A row of bench/results/.

    Args:
        report: of the run.
        config: that it measured.
        sources: what the images were.
    """
    cache = report.cache
    return {
        "bench": "loader",
        **conditions(config, report.settings, sources),
        "device": report.device,
        "loaders": [_entry(row, report.ours.rate) for row in [report.ours, *report.peers]],
        "stages": [_entry(row, report.ours.rate) for row in report.stages],
        "threads": {str(count): _entry(row, report.ours.rate) for count, row in report.threads.items()},
        "page_cache": None
        if cache is None
        else {
            "warm": _rounded(astuple(cache.warm)),
            "cold": _rounded(astuple(cache.cold)),
            "bytes_per_image": round(cache.bytes_per_image),
        },
        "step_images_per_s": None if report.step is None else round(report.step.mean, 1),
        "verdict": report.verdict,
    }


def _entry(row: Row, ours: Rate) -> dict[str, Any]:
    rate = row.rate
    return {
        "name": row.name,
        "images_per_s": round(rate.mean, 1),
        "interval": _rounded(rate.interval),
        "repeats": _rounded(rate.images_per_s),
        "views_per_s": round(rate.mean * row.views, 1),
        "cpu_ms_per_image": round(rate.cpu_s_per_image * 1e3, 3),
        "cores_busy": round(rate.cores_busy, 2),
        "memory_mib": round(rate.memory_mib),
        "images": rate.images,
        "ours_is": [round(edge, 3) for edge in astuple(ours.over(rate))],
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 1) if math.isfinite(value) else None for value in values]


def save_plot(report: Report, out: Path) -> None:
    """Bars of everything that was measured, with intervals, to a PNG."""
    rows = [report.ours, *report.peers, *report.stages, *report.threads.values()]
    colours = [_OURS, *[_PEER] * len(report.peers), *[_PART] * len(report.stages), *[_OURS] * len(report.threads)]
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows))
    means = [row.rate.mean for row in rows]
    errors = [max(row.rate.interval[1] - row.rate.mean, 0.0) for row in rows]
    axes.barh(places, means, xerr=errors, color=colours, error_kw={"lw": 1, "capsize": 2})
    for place, row, error in zip(places, rows, errors, strict=True):
        axes.text(row.rate.mean + error, place, f"  {row.rate.mean:.0f}", va="center", fontsize=8)
    if report.step is not None:
        axes.axvline(report.step.mean, color="#b03a2e", linestyle="--", label="what a training step takes")
        axes.legend(loc="lower right", frameon=False)
    axes.set_xscale("log")
    axes.set_xlim(right=max(means) * 2)
    axes.set_yticks(list(places), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("source images per second, logarithmic; bars: 95 % interval of the mean")
    axes.set_title(
        f"{report.settings.cores} cores, batches of {report.settings.batch} on {report.device}: this loader (green), "
        f"others (grey), its parts alone (yellow)",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(out, figure, dpi=120)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of bench/results/.

    Raises:
        UserError: it cannot be read, or is not JSON lines.
    """
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}; expected a file of rows, such as bench/results/loader.jsonl"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: expected one JSON object a line, as --record writes them ({error})") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: expected one JSON object a line, as --record writes them")
    return rows


def find_row(place: str) -> dict[str, Any]:
    """A row of bench-loader: FILE, its last row, or FILE:NUMBER, counted from 1.

    Raises:
        UserError: there is no such row.
    """
    name, colon, number = place.rpartition(":")
    file, wanted = (Path(name), int(number)) if colon and number.isdecimal() else (Path(place), 0)
    rows = [row for row in read_rows(file) if row.get("bench") == "loader" and "machine" in row]
    if not 0 <= wanted <= len(rows) or not rows:
        raise UserError(f"--compare {place}: {file} holds {len(rows)} rows of bench-loader")
    return rows[wanted - 1]


def conditions(config: Config, settings: Settings, sources: str) -> dict[str, Any]:
    """What is known of a row before anything is measured."""
    tables = to_dict(config)
    return {
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
        "sources": sources,
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
    }


def require_comparable(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whether two rows, or their `conditions`, can be compared.

    Raises:
        UserError: they are of different machines, settings or sources.
    """
    for name, was, found in _conditions(before, now):
        if was != found:
            raise UserError(f"--compare: the row was measured with {name} = {was!r}, this run with {found!r}")


def regression(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What is slower than it was beyond both intervals, in a line; None if nothing is.

    Raises:
        UserError: as `require_comparable`.
    """
    require_comparable(before, now)
    (old, *_), (new, *_) = before["loaders"], now["loaders"]
    if new["interval"][1] >= old["interval"][0]:
        return None
    return (
        f"slower than the row of {before['machine']['date']} (commit {before['machine']['commit']}): "
        f"{new['images_per_s']:.0f} images/s, interval {new['interval'][0]:.0f} to {new['interval'][1]:.0f}; it was "
        f"{old['images_per_s']:.0f}, {old['interval'][0]:.0f} to {old['interval'][1]:.0f}"
    )


def _conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for table, key in (("machine", "cpu"), ("machine", "gpu"), ("settings", "cores"), ("settings", "batch")):
        yield key, before[table][key], now[table][key]
    yield "sources", before.get("sources", "small"), now.get("sources", "small")
    for table in before["config"].keys() & {"geometry", "colour", "appearance"}:  # what is made; not how
        yield table, before["config"][table], now["config"][table]


def save_history(rows: Sequence[Mapping[str, Any]], out: Path) -> int:
    """Images per second of our loader over the rows of one kind of machine, to a PNG.

    Drawn are the rows of the machine, cores and sources that most rows have, of equals the newest, in their order.

    Returns:
        How many rows were drawn.

    Raises:
        UserError: there is none.
    """
    rows = [row for row in rows if row.get("bench") == "loader" and "machine" in row]
    if not rows:
        raise UserError("no row of bench-loader in the file: --record writes them")
    ((kind, _),) = Counter(_kind(row) for row in reversed(rows)).most_common(1)  # of equals, the first met
    alike = [row for row in rows if _kind(row) == kind]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in (("this loader", _OURS), ("decode only (DALI)", _PART), ("OpenCV + DataLoader", _PEER)):
        names = (name, f"{name} (auto)")  # as older rows call it
        found = [(place, e) for place, row in enumerate(alike) for e in row["loaders"] if e["name"] in names]
        if not found:
            continue
        means = [entry["images_per_s"] for _, entry in found]
        half = [entry["interval"][1] - entry["images_per_s"] for _, entry in found]
        axes.errorbar([place for place, _ in found], means, half, color=colour, marker="o", capsize=3, label=name)
    axes.set_xticks(range(len(alike)), [f"{row['machine']['date']}\n{row['machine']['commit'][:12]}" for row in alike])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("source images per second")
    axes.set_title(f"{kind[0]}, {kind[1]} cores, {kind[2]} sources; bars: 95 % interval", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(out, figure, dpi=120)
    return len(alike)


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["machine"]["cpu"], row["settings"]["cores"], row.get("sources", "small")

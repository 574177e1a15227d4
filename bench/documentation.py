"""Writes the tables of README.md and docs/ from the rows of bench/results/, so that every figure has its row.

A table stands between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from bench.loaders import first_batch
from bench.rows import read_rows, yes_or_no
from bench.training.report import FIGURES
from errors import UserError
from train.pictures import save_figure
from train.pose.metrics import METRICS
from writing import write_text

Row = Mapping[str, Any]

_BLOCK: Final = re.compile(r"(<!-- rows: ([a-z-]+) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_BETTER, _WORSE, _SEED = "#2f6f4f", "#b3412f", "#9aa5b1"


def write_docs(results: Path, docs: Path) -> str:
    """Write the tables of the pages in `docs` and of the README.md beside it, and the picture. Returns a summary."""
    done = []
    for page in pages_with_tables(docs):
        write_text(page, fill_tables(page.read_text(), results))
        done.append(f"{page}: tables from {results}")
    if not (readme := docs.parent / "README.md").exists():
        done.append(f"{readme}: no such file, so its tables were not written")
    if claims := comparisons(results):
        picture = docs / "images" / "experiment_hands.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        save_comparisons(claims, picture)
        done.append(f"{picture}: {len(claims)} comparisons")
    return "\n".join(done)


def pages_with_tables(docs: Path) -> list[Path]:
    """The pages with a table of rows: pages in the folder `docs`, and the README.md beside it."""
    pages = [*sorted(docs.glob("*.md")), docs.parent / "README.md"]
    return [page for page in pages if page.exists() and _BLOCK.search(page.read_text())]


def fill_tables(text: str, results: Path) -> str:
    """The page's text, with its tables written again from the rows in the folder `results`.

    Raises:
        UserError: a table's name is unknown.
    """

    def made(block: re.Match[str]) -> str:
        if block[2] not in _TABLES:
            raise UserError(f"<!-- rows: {block[2]} -->: expected one of {', '.join(_TABLES)}")
        try:
            table = _TABLES[block[2]](results)
        except _NoRowError as none:
            table = f"No row yet{none}.\n"
        return f"{block[1]}\n{table}\n{block[3]}"

    return _BLOCK.sub(made, text)


class _NoRowError(LookupError):
    """There is no row yet for a table."""


def _loader(sources: str, part: str, *, short: bool = False) -> Callable[[Path], str]:
    """Make the table of "loaders" or "stages" of the newest row with these sources; `short` is for the README."""

    def table(results: Path) -> str:
        row = _last(results / "loader.jsonl", lambda row: _on_cpu(row) and row.get("sources", "small") == sources)
        lines = [
            (
                entry["name"],
                f"{entry['images_per_s']:.0f}",
                f"{entry['interval'][0]:.0f} to {entry['interval'][1]:.0f}",
                f"{entry['cpu_ms_per_image']:.3f}",
                "{:.2f} x ({:.2f} to {:.2f})".format(*entry["ours_is"]) if "ours_is" in entry else "-",
            )
            for entry in row[part]
        ]
        if short:
            shown = _markdown(("loader", "images/s", "this loader is (95 %)"), [line[:2] + line[4:] for line in lines])
        else:
            shown = _markdown(("", "images/s", "95 % interval", "CPU ms per image", "this loader is"), lines)
        said = f"\n{row['verdict']}\n" if part == "loaders" and "verdict" in row and not short else ""
        return f"{_measured_on(row)}\n\n{shown}{said}"

    return table


def _first_batch(results: Path) -> str:
    row = _last(results / "first_batch.jsonl")
    return f"{_measured_on(row)}: {first_batch.summary(row)}.\n"


def _proofs(results: Path) -> str:
    """A table of rows that tests record: the newest row of each kind."""
    lines = []
    for file in sorted(results.glob("*.jsonl")):
        if file.stem in _IN_OTHER_TABLES:
            continue
        for row in {row.get("proof"): row for row in _rows(file)}.values():
            figures = ", ".join(f"{name.replace('_', ' ')} {_figure(row[name])}" for name in row if name not in _HEAD)
            lines.append((f"{row['place']}, {row['machine']['date']}", figures))
    if not lines:
        raise _NoRowError
    return _markdown(("row", "figures"), lines)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _train(results: Path) -> str:
    row = _last(results / "train.jsonl", _on_cpu)
    encoder, geometry = row["config"]["encoder"], row["config"]["geometry"]
    first = row["precisions"][0]
    said = (
        f"{_measured_on(row)}, {encoder['name']} at {geometry['side_px']} pixels, batches of {first['batch']} in "
        f"micro-batches of {first['micro_batch']}."
    )
    heads = ("", *(one["precision"] for one in row["precisions"]))
    lines = [(name, *map(cell, row["precisions"])) for name, cell in FIGURES.items()]
    return f"{said}\n\n{_markdown(heads, lines)}"


def _soak(results: Path) -> str:
    row = _last(results / "soak.jsonl")
    first, last = row["history"][0], row["history"][-1]
    return (
        f"{_measured_on(row)}: {row['seconds'] / 60:.0f} minutes, {row['images']} images, memory "
        f"{row['memory_growth']:+.2%} from the first minute to the end ({last[1]:.0f} MiB), open files "
        f"{first[2]} at the beginning and {last[2]} at the end.\n"
    )


def _gpu(results: Path) -> str:
    """A table of the claims in the newest row of each stage of `bench-gpu`."""
    stages = {row["stage"]: row for row in _rows(results / "gpu.jsonl") if not row["dry_run"]}
    if not stages:
        raise _NoRowError(": none of this has been measured")
    lines = [
        (row["stage"], claim["what"], claim["found"], claim["wanted"], yes_or_no(claim["holds"]), row["place"])
        for row in stages.values()
        for claim in row["claims"]
    ]
    machines = "\n".join(dict.fromkeys(f"- {_machine(row)}" for row in stages.values()))
    return f"{machines}\n\n{_markdown(('stage', 'what', 'found', 'wanted', 'holds', 'row'), lines)}"


def comparisons(results: Path) -> list[Row]:
    """The newest row of each comparison of the experiments."""
    rows = [row for row in _rows(results / "experiments.jsonl") if row["kind"] == "comparison"]
    return list({(row["better"], row["than"], row["metric"]): row for row in rows}.values())


def _experiment(results: Path) -> str:
    rows, claims = list(_rows(results / "experiments.jsonl")), comparisons(results)
    if not claims:
        raise _NoRowError
    seeds = claims[-1]["seeds"]

    def latest(kind: str) -> dict[tuple[Any, ...], Row]:
        return {(row.get("arm"), row.get("seed")): row for row in rows if row["kind"] == kind}

    arms, took, constant = latest("finetune"), latest("seed"), latest("constant")[None, None]
    metrics = ("pa_epe_cm", "epe_cm", "epe_px")
    names = dict.fromkeys(name for name, _ in arms)
    means = [
        (name, *(f"{sum(arms[name, seed][metric] for seed in seeds) / len(seeds):.3f}" for metric in metrics))
        for name in names
    ]
    minutes = [[took[None, seed][key] / 60 for seed in seeds] for key in ("seconds", "cpu_seconds")]
    return (
        f"{_measured_on(claims[-1])}; {len(seeds)} seeds, each {_span(minutes[1])} minutes of CPU time (the wall times "
        f"of its runs add up to {_span(minutes[0])} minutes).\n\n"
        f"{_markdown(COMPARISON_HEADS, [comparison_cells(row) for row in claims])}\n"
        f"{_markdown(('mean over seeds', *(_metric(metric) for metric in metrics)), means)}\n"
        f"PA-EPE of constant predictions: the mean pose {constant['mean_pose_pa_epe_cm']:.3f} cm, one rigid hand "
        f"{constant['rigid_hand_pa_epe_cm']:.3f} cm.\n"
    )


COMPARISON_HEADS: Final = ("", "metric", "each seed", "mean", "95 % interval", "holds")


def comparison_cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of kind "comparison", in the order of `COMPARISON_HEADS`."""
    return (
        f"{row['better']} minus {row['than']}",
        _metric(row["metric"]),
        ", ".join(f"{difference:+.3f}" for difference in row["differences"]),
        f"{row['mean']:+.3f}",
        f"{row['low']:+.3f} to {row['high']:+.3f}",
        "yes" if row["holds"] else "no",
    )


def _metric(name: str) -> str:
    return ", ".join(filter(None, (METRICS[name].title, METRICS[name].unit)))


def save_comparisons(rows: Sequence[Row], out: Path) -> None:
    """Draw rows of the kind "comparison": the seeds' differences, their mean and its interval.

    Each comparison has its own panel, since the units differ.
    """
    figure = Figure(figsize=(7.5, 0.55 + 0.85 * len(rows)), layout="constrained")
    for row, axes in zip(rows, figure.subplots(len(rows), squeeze=False)[:, 0], strict=True):
        colour = _BETTER if row["holds"] else _WORSE
        axes.axvline(0, color="black", linewidth=0.8)
        axes.plot([row["low"], row["high"]], [0, 0], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(row["differences"], [0.35] * len(row["differences"]), "o", color=_SEED, markersize=4)
        axes.plot(row["mean"], 0, "D", color=colour, markersize=6)
        axes.set_ylim(-0.6, 0.8)
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_title(f"{row['better']} minus {row['than']}: {_metric(row['metric'])}", fontsize=9, loc="left")
    figure.supxlabel("difference; dots: each seed, diamond and bar: mean and 95 % interval", fontsize=8)
    save_figure(out, figure, dpi=120)


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


def _scaling_error(results: Path) -> str:
    rows = {row["measured"]["ranks"]: row for row in _rows(results / "scaling.jsonl")}  # the last of each number
    if not rows:
        raise _NoRowError
    lines = []
    for ranks, row in sorted(rows.items()):
        measured, link, errors = row["measured"], row["here"]["inside"], row["errors_of_sums"]
        lines.append(
            (
                str(ranks),
                f"{link['latency_s'] * 1e6:.0f}" if errors else "-",
                f"{link['bytes_per_s'] / 1e9:.2f}" if errors else "-",
                f"{min(errors):+.0%} to {max(errors):+.0%}" if errors else "-",
                f"{measured['micro_batch_s']:.3f}",
                f"{measured['fixed_s']:.3f}",
                f"{measured['step_s']:.3f}",
                f"{row['step_s_predicted_here']:.3f}",
                f"{row['error_here']:+.0%}",
                f"{measured['load']:.1f}",
                row["place"],
            )
        )
    heads = (
        "ranks", "us per hop", "GB/s", "error of the sums, 16 B to 16 MiB", "t_micro s", "t_fixed s",
        "step s, measured", "step s, model", "error", "load before", "row",
    )  # fmt: skip
    work = row["work"]
    said = (
        f"{_machine(row)}; batches of {work['batch']} in micro-batches of {work['micro_batch']}, {work['parameters']} "
        f"parameters"
    )
    return f"{said}.\n\n{_markdown(heads, lines)}"


def _find_boxes(results: Path) -> str:
    row = _last(results / "find_boxes.jsonl")
    lines = [
        ("hands found", f"{row['found']} of {row['images']}"),
        ("median error of the landmarks, mean over a hand", f"{row['keypoint_error_px']:.1f} px"),
        ("median error of the boxes' centres", f"{row['box_centre_error_px']:.1f} px"),
        ("median side of the boxes over the true side", f"{row['box_side_over_true']:.2f}"),
        ("found right hands that are called left", f"{row['right_called_left']} of {row['found']}"),
        ("mirror images in which the hand is found", f"{row['mirrored_found']} of {row['mirrored_images']}"),
        ("found left hands that are called right", f"{row['mirrored_called_right']} of {row['mirrored_found']}"),
    ]
    return f"{_measured_on(row)}\n\n{_markdown(('', 'measured'), lines)}"


_TABLES: Final[Mapping[str, Callable[[Path], str]]] = {
    "loaders": _loader("small", "loaders"),
    "stages": _loader("small", "stages"),
    "loaders-large": _loader("large", "loaders"),
    "stages-large": _loader("large", "stages"),
    "train": _train,
    "soak": _soak,
    "gpu": _gpu,
    "experiment": _experiment,
    "scaling-error": _scaling_error,
    "loaders-in-short": _loader("small", "loaders", short=True),
    "loaders-large-in-short": _loader("large", "loaders", short=True),
    "first-batch": _first_batch,
    "find-boxes": _find_boxes,
    "proofs": _proofs,
}
_IN_OTHER_TABLES: Final = {
    "loader",
    "train",
    "soak",
    "gpu",
    "experiments",
    "scaling",
    "first_batch",
    "find_boxes",
}
_HEAD: Final = {"bench", "machine", "place"}


def _on_cpu(row: Row) -> bool:
    return bool(row["machine"]["gpu"] == "none")


def _last(file: Path, wanted: Callable[[Row], bool] = lambda row: True) -> Row:
    rows = [row for row in _rows(file) if wanted(row)]
    if not rows:
        raise _NoRowError
    return rows[-1]


def _rows(file: Path) -> Iterator[Row]:
    for number, row in enumerate(read_rows(file) if file.exists() else [], 1):
        yield {**row, "place": f"`{file.name}`, row {number}"}


def _measured_on(row: Row) -> str:
    return f"{row['place']}: {_machine(row)}"


def _machine(row: Row) -> str:
    machine = row["machine"]
    cores = row.get("settings", {}).get("cores", machine["cores"])
    where = machine["gpu"] if machine["gpu"] != "none" else "no GPU"
    return f"{cores} cores of an {machine['cpu']}, {where}, {machine['date']}, commit {machine['commit']}"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

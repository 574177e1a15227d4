"""Writes the tables of README.md and docs/ from the rows of bench/results/, so that every figure has its row.

A table stands between `<!-- rows: NAME -->` and `<!-- end rows -->`. The name of a study's tables is "study" and the
name of its file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from bench.classification.documents import draw_photographs, photographs_in_short, photographs_table
from bench.gpu.cards import CARDS
from bench.gpu.estimate import SOURCES
from bench.gpu.estimate_tables import estimate
from bench.loaders import first_batch
from bench.proofs import proofs
from bench.rows import yes_or_no
from bench.studies.pictures import write_pictures
from bench.studies.tables import overview
from bench.studies.tables import tables as study_tables
from bench.tables import NoRowError, Row, machine_of, markdown, measured_on, rows_of
from bench.training.report import FIGURES
from errors import UserError
from train.config.pretraining import Config
from writing import write_text

_BLOCK: Final = re.compile(r"(<!-- rows: ([a-z-]+(?: \w+)?) -->\n).*?(<!-- end rows -->)", re.DOTALL)


def write_docs(results: Path, docs: Path) -> str:
    """Write the tables of the pages in `docs` and of the README.md beside it, and the picture. Returns a summary."""
    done = []
    for page in pages_with_tables(docs):
        write_text(page, fill_tables(page.read_text(), results))
        done.append(f"{page}: tables from {results}")
    if not (readme := docs.parent / "README.md").exists():
        done.append(f"{readme}: no such file, so its tables were not written")
    done += write_pictures(results, docs / "images")
    with contextlib.suppress(NoRowError):
        done.append(draw_photographs(results, docs / "images"))
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
        name, _, study = block[2].partition(" ")
        if name not in _TABLES and name != "study":
            raise UserError(f"<!-- rows: {block[2]} -->: expected one of {', '.join(_TABLES)}, or study and its name")
        try:
            table = study_tables(results, study) if name == "study" else _TABLES[name](results)
        except NoRowError as none:
            table = f"No row yet{none}.\n"
        return f"{block[1]}\n{table}\n{block[3]}"

    return _BLOCK.sub(made, text)


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
            shown = markdown(("loader", "images/s", "this loader is (95 %)"), [line[:2] + line[4:] for line in lines])
        else:
            shown = markdown(("", "images/s", "95 % interval", "CPU ms per image", "this loader is"), lines)
        said = f"\n{row['verdict']}\n" if part == "loaders" and "verdict" in row and not short else ""
        return f"{measured_on(row)}\n\n{shown}{said}"

    return table


def _first_batch(results: Path) -> str:
    row = _last(results / "first_batch.jsonl")
    return f"{measured_on(row)}: {first_batch.summary(row)}.\n"


def _train(results: Path) -> str:
    row = _last(results / "train.jsonl", _on_cpu)
    encoder, geometry = row["config"]["encoder"], row["config"]["geometry"]
    first = row["precisions"][0]
    said = (
        f"{measured_on(row)}, {encoder['name']} at {geometry['side_px']} pixels, batches of {first['batch']} in "
        f"micro-batches of {first['micro_batch']}."
    )
    heads = ("", *(one["precision"] for one in row["precisions"]))
    lines = [(name, *map(cell, row["precisions"])) for name, cell in FIGURES.items()]
    return f"{said}\n\n{markdown(heads, lines)}"


def _soak(results: Path) -> str:
    row = _last(results / "soak.jsonl")
    first, last = row["history"][0], row["history"][-1]
    return (
        f"{measured_on(row)}: {row['seconds'] / 60:.0f} minutes, {row['images']} images, memory "
        f"{row['memory_growth']:+.2%} from the first minute to the end ({last[1]:.0f} MiB), open files "
        f"{first[2]} at the beginning and {last[2]} at the end.\n"
    )


def _gpu(results: Path) -> str:
    """A table of the claims in the newest row of each stage of `bench-gpu`."""
    stages = {row["stage"]: row for row in rows_of(results / "gpu.jsonl") if not row["dry_run"]}
    if not stages:
        raise NoRowError(": none of this has been measured")
    lines = [
        (row["stage"], claim["what"], claim["found"], claim["wanted"], yes_or_no(claim["holds"]), row["place"])
        for row in stages.values()
        for claim in row["claims"]
    ]
    machines = "\n".join(dict.fromkeys(f"- {machine_of(row)}" for row in stages.values()))
    return f"{machines}\n\n{markdown(('stage', 'what', 'found', 'wanted', 'holds', 'row'), lines)}"


def _gpu_estimate(results: Path) -> str:
    """Tables that are computed and need no rows: the costs of the GPU path with the paper's values."""
    shown = estimate(Config(), SOURCES, CARDS)
    return "\n".join(f"{part.said}\n\n{markdown(part.heads, part.lines)}" for part in shown)


def _scaling_error(results: Path) -> str:
    rows = {row["measured"]["ranks"]: row for row in rows_of(results / "scaling.jsonl")}  # the last of each number
    if not rows:
        raise NoRowError
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
        f"{machine_of(row)}; batches of {work['batch']} in micro-batches of {work['micro_batch']}, "
        f"{work['parameters']} parameters"
    )
    return f"{said}.\n\n{markdown(heads, lines)}"


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
    return f"{measured_on(row)}\n\n{markdown(('', 'measured'), lines)}"


def _networks(results: Path) -> str:
    """A table of the newest row of each network that is trained here, on each set of images."""
    newest = {(row["network"], row["measured_on"]): row for row in rows_of(results / "networks.jsonl")}
    if not newest:
        raise NoRowError
    lines = [
        (
            row["network"], row["measured_on"], _number(row, "pa_epe_cm", 2), _number(row, "rigid_pose_pa_epe_cm", 2),
            _number(row, "epe_px", 1), _number(row, "median_epe_px", 1), _number(row, "mean_keypoints_epe_px", 1),
            f"{row['place']}, {row['machine']['date']}",
        )
        for row in newest.values()
    ]  # fmt: skip
    heads = (
        "network", "measured on", "PA-EPE (cm)", "one rigid hand's", "2D EPE (px of 224)", "its median",
        "the mean keypoints'", "row",
    )  # fmt: skip
    return markdown(heads, lines)


def _number(row: Row, name: str, decimals: int) -> str:
    return f"{row[name]:.{decimals}f}" if name in row else "-"


_TABLES: Final[Mapping[str, Callable[[Path], str]]] = {
    "loaders": _loader("small", "loaders"),
    "stages": _loader("small", "stages"),
    "loaders-large": _loader("large", "loaders"),
    "stages-large": _loader("large", "stages"),
    "train": _train,
    "soak": _soak,
    "gpu": _gpu,
    "gpu-estimate": _gpu_estimate,
    "studies": overview,
    "scaling-error": _scaling_error,
    "loaders-in-short": _loader("small", "loaders", short=True),
    "loaders-large-in-short": _loader("large", "loaders", short=True),
    "first-batch": _first_batch,
    "find-boxes": _find_boxes,
    "networks": _networks,
    "photographs": photographs_table,
    "photographs-in-short": photographs_in_short,
    "proofs": lambda results: proofs(results, _IN_OTHER_TABLES),
}
_IN_OTHER_TABLES: Final[set[str]] = {
    "loader",
    "train",
    "soak",
    "gpu",
    "experiments",
    "scaling",
    "first_batch",
    "find_boxes",
    "networks",
    "photographs",
}


def _on_cpu(row: Row) -> bool:
    return bool(row["machine"]["gpu"] == "none")


def _last(file: Path, wanted: Callable[[Row], bool] = lambda row: True) -> Row:
    rows = [row for row in rows_of(file) if wanted(row)]
    if not rows:
        raise NoRowError
    return rows[-1]

"""The `report` command: runs, evaluations and predictions on one page without external files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peclr_dali.errors import UserError
from peclr_dali.skeleton import FINGERS, HAND
from peclr_dali.train.report import charts, contents, galleries
from peclr_dali.train.report.contents import Run, measured, read_runs
from peclr_dali.train.report.galleries import neighbours
from peclr_dali.writing import require_ending, write_text

_GENERATOR = b'<meta name="generator" content="peclr-dali report">'
"""Marks the pages."""


def write_report(runs: Sequence[Path], out: Path, *, predictions: Path | None = None, title: str | None = None) -> None:
    """Write a page about runs: metrics, curves, views, predictions and the worst poses, in one .html file.

    The runs are of pre-training and fine-tuning, in any order, with or without results of `evaluate`; `predictions` is
    a folder with results of `predict`. Without runs the page has these alone.

    Raises:
        UserError: nothing is given, a folder cannot be used, or the page cannot be written.
    """
    require_ending(out, ".html")
    if not runs and predictions is None:
        raise UserError("nothing to show: expected folders of runs, or --predictions. Name one")
    read = read_runs(runs)
    found = measured(read)
    sections = [
        *(galleries.errors(found) if found else []),
        *charts.pretraining_charts(read),
        *charts.finetuning_charts(read),
        *galleries.views(read),
        *([galleries.predictions(predictions)] if predictions else []),
        *galleries.held_out(read),
        *(galleries.largest_errors(found) if found else []),
        *neighbours(read),
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html").render(
        title=title or _title(read) or f"Predictions in {predictions}",
        lead=contents.in_words(found) if found else [],
        rendered=any(_is_rendered(run) for run in read),
        measured=found,
        table=contents.table(found) if found else [],
        facts=contents.facts(found) if found else [],
        sections=sections,
        runs=[(run, _summary(run)) for run in read],
        fingers=[(name, f"rgb{colour}") for name, (_, colour) in zip(FINGERS, HAND.limbs, strict=True)],
    )
    write_text(out, page)


def is_report(file: Path) -> bool:
    """Whether a file is a page of `write_report`."""
    return file.is_file() and _GENERATOR in file.read_bytes()[:500]


def _title(runs: Sequence[Run]) -> str:
    """Says what was run, such as "Pre-training demo; fine-tuning pre-trained, from scratch"."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    words = "; ".join(f"{kind} {', '.join(run.name for run in runs if run.kind == kind)}" for kind in kinds)
    return words[:1].upper() + words[1:]


def _is_rendered(run: Run) -> bool:
    """Whether a run's images are of `make-data`."""
    return any(
        source.source == "freihand" and (Path(source.root) / "dataset.json").exists() for source in run.config.data
    )


def _summary(run: Run) -> str:
    config, last = run.config, run.rows[-1]
    images_per_s, waited = (float(np.median([row[key] for row in run.rows])) for key in ("images_per_s", "wait_share"))
    return (
        f"{run.folder.root}: {config.encoder.name} from {config.encoder.weights}, {last['step']} steps of "
        f"{config.train.batch} images ({last['epoch']:.3g} epochs), {images_per_s:.0f} images/s; "
        f"{waited:.1%} of the time the loop waited for data."
    )

"""The `report` command: runs, evaluations and predictions on one page without external files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peclr_dali.errors import UserError
from peclr_dali.train.report import charts, galleries, numbers
from peclr_dali.train.report.contents import Run, measured, read_runs
from peclr_dali.train.report.neighbours import neighbours
from peclr_dali.writing import write_text


def write_report(runs: Sequence[Path], out: Path, *, predictions: Path | None = None, title: str | None = None) -> None:
    """Write a page about runs: metrics, curves, views, predictions and the worst poses, in one .html file.

    The runs are of pre-training and fine-tuning, in any order, with or without results of `evaluate`; `predictions` is
    a folder with results of `predict`. Without runs the page has these alone.

    Raises:
        UserError: nothing is given, a folder cannot be used, or the page cannot be written.
    """
    if out.suffix != ".html":
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; expected .html")
    if not runs and predictions is None:
        raise UserError("nothing to show: expected folders of runs, or --predictions. Name one")
    read = read_runs(runs)
    lead: list[str] = []
    table: list[numbers.TableRow] = []
    facts: list[str] = []
    errors: list[charts.Section] = []
    worst: list[charts.Section] = []
    try:
        found = measured(read)
        if found is not None:
            lead, table, facts = numbers.in_words(found), numbers.table(found), numbers.facts(found)
            errors, worst = [charts.error_charts(found)], galleries.largest_errors(found)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # a user may have edited metrics.json
        files = [str(run.folder.root / "evaluation" / "metrics.json") for run in read if run.evaluation is not None]
        raise UserError(f"{' or '.join(files)} was not written by evaluate. Run evaluate again") from error
    sections = [
        *errors,
        *charts.pretraining_charts(read),
        *charts.finetuning_charts(read),
        *galleries.views(read),
        *([galleries.predictions(predictions)] if predictions else []),
        *galleries.held_out(read),
        *worst,
        *neighbours(read),
    ]
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html").render(
        title=title or _title(read),
        lead=lead,
        rendered=any(_is_rendered(run) for run in read),
        measured=found,
        table=table,
        facts=facts,
        sections=sections,
        runs=[(run, _summary(run)) for run in read],
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another with --out") from error


def _title(runs: Sequence[Run]) -> str:
    """Says what was run, such as "Pre-training demo; fine-tuning pre-trained, from scratch"."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    words = "; ".join(f"{kind} {', '.join(run.name for run in runs if run.kind == kind)}" for kind in kinds)
    return words[:1].upper() + words[1:] or "Predictions"


def _is_rendered(run: Run) -> bool:
    """Whether a run's images are of `make-data`."""
    return any(
        source.source == "freihand" and (Path(source.root) / "dataset.json").exists() for source in run.config.data
    )


def _summary(run: Run) -> dict[str, str]:
    """Short facts about a run."""
    config, rows = run.config, run.rows
    sources = []
    for source in config.data:
        labels = f", {100 * source.label_fraction:g} % of the labels" if run.kind == "fine-tuning" else ""
        sources.append(f"{source.root}, {source.split}{labels}")
    images_per_s, waited = (float(np.median([row[key] for row in rows])) for key in ("images_per_s", "wait_share"))
    return {
        "folder": str(run.folder.root),
        "data": "; ".join(sources),
        "encoder": f"{config.encoder.name} from {config.encoder.weights}",
        "steps": f"{rows[-1]['step']} of {config.train.batch} images, {rows[-1]['epoch']:.3g} epochs",
        "speed": f"{images_per_s:.0f} images/s, {waited:.1%} of the time waiting for data",
        "loss": f"{rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}",
    }

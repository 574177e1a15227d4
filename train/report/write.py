"""The `report` command: runs, evaluations and predictions on one page without external files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peclr_dali.errors import UserError, printable
from peclr_dali.skeleton import FINGERS, HAND
from peclr_dali.train.report import contents
from peclr_dali.train.report.charts import charts
from peclr_dali.train.report.contents import Run
from peclr_dali.train.report.galleries import galleries
from peclr_dali.writing import require_ending, write_text


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
    read = contents.read_runs(runs)
    measured = contents.find_measured(read)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html").render(
        title=title or _title(read) or f"Predictions in {predictions}",
        lead=contents.in_words(measured) if measured else contents.of_pretraining(read),
        rendered=any((Path(source.root) / "dataset.json").exists() for run in read for source in run.config.data),
        measured=measured,
        table=contents.table(measured) if measured else [],
        sections=[*charts(read, measured), *galleries(read, measured, predictions)],
        runs=[
            (run, _summary(run), "\n".join(map(printable, run.folder.config_file.read_text().splitlines())))
            for run in read
        ],
        fingers=[(name, f"rgb{colour}") for name, (_, colour) in zip(FINGERS, HAND.limbs, strict=True)],
    )
    write_text(out, page)


def is_report(file: Path) -> bool:
    """Whether a file is a page of `write_report`, by the mark in its head."""
    return file.is_file() and b'<meta name="generator" content="peclr-dali report">' in file.read_bytes()[:500]


def _title(runs: Sequence[Run]) -> str:
    """Says what was run, such as "Pre-training of resnet50 on freihand, 600 steps"."""
    words = []
    for run in runs:
        names = " and ".join(Path(printable(source.root)).name or source.root for source in run.config.data)
        words.append(f"{run.kind} of {run.config.encoder.name} on {names}, {run.rows[-1]['step']} steps")
    text = "; ".join(dict.fromkeys(words))
    return text[:1].upper() + text[1:]


def _summary(run: Run) -> str:
    config, last = run.config, run.rows[-1]
    speed, waited = (float(np.median([row[key] for row in run.rows])) for key in ("images_per_s", "wait_share"))
    steps = np.diff([0, *(row["step"] for row in run.rows)])
    minutes = config.train.batch * sum(steps / [row["images_per_s"] for row in run.rows]) / 60
    return (
        f"{run.folder.root}: {config.encoder.name} from {config.encoder.weights}, {last['step']} steps of "
        f"{config.train.batch} images ({last['epoch']:.3g} epochs) in {minutes:.1f} minutes, {speed:.0f} images/s and "
        f"{waited:.1%} of the time waiting for data (medians)."
    )

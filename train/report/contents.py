"""What a report says: the runs and their evaluations, the table of metrics, and the result in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.metrics import CONSTANTS, METRICS, Metric, constants_in_words
from peclr_dali.train.runs.folder import RunFolder

NO_INTERVAL = "no interval: too few groups"


class Cell(NamedTuple):
    """A cell of the table.

    Attributes:
        interval: ends of the confidence interval in words.
        mark: of a difference; "open" if its interval contains zero or there is none.
    """

    value: float
    text: str
    interval: str
    mark: Literal["", "better", "worse", "open"] = ""


class TableRow(NamedTuple):
    """A metric, with the cells of all runs and of the difference of the first two, and constants in words."""

    metric: Metric
    cells: Sequence[Cell]
    constants: Sequence[str]


def as_text(value: float, metric: Metric, *, signed: bool = False) -> str:
    """A value with the metric's number of decimals."""
    return f"{value:{'+' if signed else ''}.{metric.decimals}f}".replace("-", "\N{MINUS SIGN}")


def cell_of(interval: Mapping[str, float | None], metric: Metric, *, signed: bool = False) -> Cell:
    """The cell of a metric's value, or of a difference if `signed`."""
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    assert value is not None
    text = as_text(value, metric, signed=signed)
    if low is None or high is None:
        return Cell(value, text, NO_INTERVAL, "open" if signed else "")
    limits = f"{as_text(low, metric, signed=signed)} to {as_text(high, metric, signed=signed)}"
    if not signed:
        return Cell(value, text, limits)
    if low <= 0 <= high:
        return Cell(value, text, limits, "open")
    return Cell(value, text, limits, "better" if (low > 0) == metric.higher_is_better else "worse")


def table(found: Measured) -> list[TableRow]:
    """Rows of the metrics that all runs have."""
    rows = []
    for name, metric in METRICS.items():
        if all(name in result["metrics"] for result in found.results):
            cells = [cell_of(result["metrics"][name], metric) for result in found.results]
            if found.difference is not None:
                cells.append(cell_of(found.difference[name], metric, signed=True))
            rows.append(TableRow(metric, cells, constants_in_words(found.results[0]["constants"], name)))
    return rows


def in_words(found: Measured) -> list[str]:
    """The errors in 3D and 2D of the only run, or the difference of the two; and where a constant is no worse."""
    names = [f"“{run.name}”" for run in found.runs]
    rows = {row.metric: row.cells for row in table(found) if row.metric in (METRICS["pa_epe_cm"], METRICS["epe_px"])}
    sentences = []
    for metric, cells in rows.items():
        last = cells[-1]
        limits = last.interval if last.interval == NO_INTERVAL else f"95 % interval {last.interval}"
        result = f"{last.text} {metric.unit} ({limits})"
        if found.difference is not None:
            relation = {"better": "is better than", "worse": "is worse than"}.get(
                last.mark, "cannot be told apart from"
            )
            sentences.append(f"By {metric.title}, {names[0]} {relation} {names[1]}: {result}.")
        else:
            sentences.append(f"{names[0]} has a {metric.title} of {result}.")
    for name, errors in zip(names, found.results, strict=True):
        error = errors["metrics"].get("pa_epe_cm", {"value": 0.0})["value"]
        of_constants = errors["constants"].items()
        constants = {known["pa_epe_cm"]: CONSTANTS[key] for key, known in of_constants if "pa_epe_cm" in known}
        least = min(constants, default=math.inf)
        if error >= least:
            sentences.append(
                f"In 3D, {name} is no better than {constants[least]}, which does not look at the picture: a PA-EPE of "
                f"{error:.2f} cm beside {least:.2f} cm."
            )
    return sentences


def facts(found: Measured) -> list[str]:
    """Notes on the data, the alignment and the limits of the numbers."""
    first = found.results[0]
    left_out = "".join(f", {count} left out: {reason}" for reason, count in first["left_out"].items() if count)
    notes = [
        f"Measured on {first['images']} images of {first['data']}{left_out}. Alignment: {first['alignment']}.",
        "Constant predictions do not look at the picture; their constants are fitted to these labels.",
        "Intervals are 95 %, over groups of images. They do not include the variation between training runs: with "
        "other seeds, the result may differ.",
    ]
    if found.difference is not None:
        notes.append("The difference is that of the first two, paired by image; open: its interval contains zero.")
    if found.unseen:
        names = ", ".join(f"“{run.name}”" for run in found.unseen)
        notes.append(f"Not shown: {names}. 'evaluate RUN --compare RUN2' puts two runs side by side.")
    return notes


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Contents of a run's folder.

    Attributes:
        name: displayed name: the starting weights of fine-tuning, or the folder's name.
        rows: rows of metrics.jsonl, at least one.
        validations: rows of validation.jsonl: validations of fine-tuning, probes of pre-training.
        evaluation: results of `evaluate`, see `peclr_dali.train.evaluation.report.results`, or None.
    """

    folder: RunFolder
    name: str
    config: Config | FinetuneConfig
    rows: Sequence[Row]
    validations: Sequence[Row]
    evaluation: Mapping[str, Any] | None

    @property
    def kind(self) -> str:
        """The kind of the run in words."""
        return "pre-training" if isinstance(self.config, Config) else "fine-tuning"


@dataclass(frozen=True)
class Measured:
    """Errors of a fine-tuned run, and of the run with which `evaluate --compare` compared it on the same images.

    Attributes:
        results: results of each run.
        difference: paired difference of the two runs: metric -> value, low and high; None if there is one.
        unseen: evaluated runs that were not compared with the first, and are left out.
    """

    runs: Sequence[Run]
    results: Sequence[Mapping[str, Any]]
    difference: Mapping[str, Mapping[str, float | None]] | None
    unseen: Sequence[Run]


def read_run(root: Path) -> Run:
    """Read a run of pre-training or fine-tuning.

    Raises:
        UserError: the folder is not a run's folder, or it has not trained yet.
    """
    folder = RunFolder(root, keep=1)
    if not (folder.config_file.exists() and folder.config_file.stat().st_size):
        raise UserError(
            f"{root} is not a run's folder: {folder.config_file.name} is missing or empty; expected a folder that "
            "pretrain or finetune wrote. Name such a folder"
        )
    config, name = folder.read_config(), root.name
    if isinstance(config, FinetuneConfig):
        starts = {"random": "from scratch", "imagenet": "from ImageNet"}
        name = starts.get(config.encoder.weights, "pre-trained")
    rows = [row for row in folder.read_metrics() if "loss" in row]
    if not rows:
        raise UserError(
            f"{root} has no rows in metrics.jsonl: it has not trained yet, or it is a result of 'probe', which takes "
            "no steps. Name a run of pretrain or finetune"
        )
    evaluation = root / "evaluation" / "metrics.json"
    results = json.loads(evaluation.read_text()) if evaluation.exists() else None
    return Run(folder, name, config, rows, folder.read_validations(), results)


def read_runs(roots: Sequence[Path]) -> list[Run]:
    """Read several runs; errors as in `read_run`. If two have the same name, the folder's name is added."""
    runs = [read_run(root) for root in roots]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({run.folder.root.name})") if names.count(run.name) > 1 else run for run in runs
    ]


def measured(runs: Sequence[Run]) -> Measured | None:
    """The evaluation of the first compared pair among `runs`, or of the first evaluated run; None if there is none."""
    evaluated = [(run, run.evaluation) for run in runs if run.kind == "fine-tuning" and run.evaluation is not None]
    for run, evaluation in evaluated:
        if comparison := evaluation.get("comparison"):
            checkpoint = Path(comparison["minus"]).resolve()
            other = next((one for one in runs if one.folder.root.resolve() in checkpoint.parents), None)
            if other is not None:
                unseen = [one for one, _ in evaluated if one not in (run, other)]
                return Measured([run, other], [evaluation, comparison["other"]], comparison["difference"], unseen)
    if not evaluated:
        return None
    run, evaluation = evaluated[0]
    return Measured([run], [evaluation], None, [one for one, _ in evaluated[1:]])

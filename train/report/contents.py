"""What a report says: the runs and their evaluations, the table of metrics, and the result in words."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.metrics import METRICS, NO_INTERVAL, Metric, constants_in_words
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.meter import errors_in_words

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Contents of a run's folder.

    Attributes:
        rows: rows of metrics.jsonl, at least one.
        validations: rows of validation.jsonl: validations of fine-tuning, probes of pre-training.
        evaluation: results of `evaluate`, see `peclr_dali.train.evaluation.report.results`, or None.
    """

    folder: RunFolder
    name: str
    config: Config | FinetuneConfig
    rows: Sequence[Row]
    validations: Sequence[Row]
    evaluation: Row | None

    @property
    def kind(self) -> str:
        """The kind of the run in words."""
        return "pre-training" if isinstance(self.config, Config) else "fine-tuning"


@dataclass(frozen=True)
class Measured:
    """Errors of a fine-tuned run, and of the run with which `evaluate --compare` compared it on the same images.

    Several runs on each side are named by the first, and have the means of their errors.
    """

    runs: Sequence[Run]
    results: Sequence[Row]  # of each run
    comparison: Row  # "difference": metric -> value, low and high; "lost", "notes". Empty if there is one run


def read_runs(roots: Sequence[Path]) -> list[Run]:
    """Read runs of pre-training or fine-tuning. Each has its folder's name, or its path if two have the same name.

    Raises:
        UserError: a folder is not a run's folder, or the run has not trained yet.
    """
    names = [root.name for root in roots]
    return [_read_run(root, root.name if names.count(root.name) == 1 else str(root)) for root in roots]


def _read_run(root: Path, name: str) -> Run:
    folder = RunFolder(root, keep=1)
    if not folder.config_file.exists():
        raise UserError(
            f"{root} is not a run's folder: it has no config.toml. Name one that pretrain or finetune wrote"
        )
    rows = [row for row in folder.read_metrics() if {"loss", "images_per_s"} <= row.keys()]
    if not rows:
        raise UserError(
            f"{root} has no rows in metrics.jsonl: it has not trained yet, or it is a result of 'probe', which takes "
            "no steps. Name a run of pretrain or finetune"
        )
    evaluation = root / "evaluation" / "metrics.json"
    results: Any = None
    if evaluation.exists():
        with suppress(ValueError):
            results = parse_json(regular(evaluation).read_bytes())
        if not (isinstance(results, dict) and {"metrics", "constants"} <= results.keys()):
            raise UserError(f"{evaluation}: expected what 'evaluate' writes. Run it again, or move the file away")
    return Run(folder, name, folder.read_config(), rows, folder.read_validations(), results)


def find_measured(runs: Sequence[Run]) -> Measured | None:
    """The evaluation of the first compared pair among `runs`, or of the first evaluated run; None if there is none."""
    evaluated = [(run, run.evaluation) for run in runs if run.kind == "fine-tuning" and run.evaluation is not None]
    for run, evaluation in evaluated:
        if comparison := evaluation.get("comparison"):
            checkpoint = Path(comparison["minus"]).resolve()
            for other in runs:
                if other.folder.root.resolve() in checkpoint.parents:
                    return Measured([run, other], [evaluation, comparison["other"]], comparison)
    return Measured([evaluated[0][0]], [evaluated[0][1]], {}) if evaluated else None


class Cell(NamedTuple):
    """A value of the table, and its interval in words; a difference is open if the interval contains zero."""

    value: float
    text: str
    interval: str
    mark: Literal["", "better", "worse", "open"] = ""


def table(measured: Measured) -> list[tuple[Metric, list[Cell], list[str]]]:
    """The metrics that all runs have: the cells of the runs and of the difference, and constants in words."""
    rows = []
    for name, metric in METRICS.items():
        if all(name in result["metrics"] for result in measured.results):
            cells = [_cell(result["metrics"][name], metric) for result in measured.results]
            if measured.comparison:
                cells.append(_cell(measured.comparison["difference"][name], metric, signed=True))
            rows.append((metric, cells, constants_in_words(measured.results[0]["constants"], name)))
    return rows


def _cell(interval: Mapping[str, Any], metric: Metric, *, signed: bool = False) -> Cell:
    """The cell of a metric's value, or of a difference if `signed`."""
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    text = as_text(value, metric, signed=signed)
    if low is None or high is None:
        return Cell(value, text, NO_INTERVAL, "open" if signed else "")
    limits = f"{as_text(low, metric, signed=signed)} to {as_text(high, metric, signed=signed)}"
    if not signed:
        return Cell(value, text, limits)
    better = (low > 0) == metric.higher_is_better
    return Cell(value, text, limits, "open" if low <= 0 <= high else "better" if better else "worse")


def as_text(value: float, metric: Metric, *, signed: bool = False) -> str:
    """A value with the metric's number of decimals."""
    return f"{value:{'+' if signed else ''}.{metric.decimals}f}".replace("-", "\N{MINUS SIGN}")


def of_pretraining(runs: Sequence[Run]) -> list[str]:
    """The loss and the probe of each run of pre-training, at the start and at the end."""
    sentences = []
    for run in (run for run in runs if run.kind == "pre-training"):
        words = f"“{run.name}”: loss {run.rows[0]['loss']:.2f} at first, {run.rows[-1]['loss']:.2f} at the end"
        if run.validations:
            probes = [
                f"step {row['step']}: {errors_in_words(row)}" for row in (run.validations[0], run.validations[-1])
            ]
            words += f"; keypoints from its frozen features, {' and '.join(probes)}"
        sentences.append(f"{words}.")
    return sentences


def in_words(measured: Measured) -> list[str]:
    """The errors in 3D and 2D of the only run, or the difference of the two; and where constants are no worse."""
    names = [
        f"“{run.name}”{f' and {more} more' if (more := len(result['checkpoints']) - 1) else ''}"
        for run, result in zip(measured.runs, measured.results, strict=True)
    ]
    sentences = []
    lost = measured.comparison.get("lost", ())
    for metric, cells, _ in table(measured):
        if metric in (METRICS["pa_epe_cm"], METRICS["epe_px"]):
            *_, (_, text, limits, mark) = cells
            value = f"{text} {metric.unit} ({limits if limits == NO_INTERVAL else f'95 % interval {limits}'})"
            if not measured.comparison:
                sentences.append(f"{names[0]} has a {metric.title} of {value}.")
            elif metric not in [METRICS[name] for name in lost]:
                words = {"better": "is better than", "worse": "is worse than", "open": "cannot be told apart from"}
                sentences.append(f"By {metric.title}, {names[0]} {words[mark]} {names[1]}: {value}.")
    for name, result in zip(names, measured.results, strict=True):
        sentences += [
            f"By {METRICS[key].title}, {name} is no better than {constants_in_words(result['constants'], key)[0]} "
            f"{METRICS[key].unit}, which does not look at the picture."
            for key in ("pa_epe_cm", "epe_px")
            if key in result["lost_to_constants"] and key not in lost
        ]
    return [*sentences, *measured.comparison.get("notes", ())]

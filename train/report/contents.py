"""Reads the contents of a report from the folders of runs, evaluations and predictions."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from errors import UserError
from parsing import regular
from train.runs.folder import RunFolder

Kind = Literal["pre-training", "fine-tuning"]

_CURVES: Final[Mapping[Kind, Sequence[str]]] = {
    "pre-training": ("positive_rank",),
    "fine-tuning": ("keypoints_px", "depth"),
}
"""Keys of metrics.jsonl that only one kind of run has."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run's folder.

    Attributes:
        name: displayed name: the starting weights of fine-tuning, or the folder's name.
        config: tables of the configuration, as plain values.
        config_text: the configuration as TOML.
        rows: rows of metrics.jsonl.
        validations: rows of validation.jsonl: validations of fine-tuning, probes of pre-training.
        evaluation: results of `evaluate`, or None.
    """

    folder: RunFolder
    kind: Kind
    name: str
    config: Mapping[str, Any]
    config_text: str
    rows: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """Errors of several fine-tuned runs on the same images.

    Attributes:
        results: results of each run, see `train.evaluation.report.results`.
        difference: paired difference of the first two runs: metric -> value, low and high; None if they were not
            compared.
        elsewhere: runs that were measured on other images and are left out.
    """

    runs: Sequence[Run]
    results: Sequence[Mapping[str, Any]]
    difference: Mapping[str, Mapping[str, float | None]] | None
    elsewhere: Sequence[Run]


def read_run(root: Path) -> Run:
    """Read a run of pre-training or fine-tuning.

    Raises:
        UserError: the folder is not a run's folder, or a file in it cannot be read.
    """
    folder = RunFolder(root, keep=1)
    try:
        text = regular(folder.config_file).read_text()
        config = tomllib.loads(text)
        if not config:
            raise ValueError("it is empty")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{root} is not a run's folder: config.toml cannot be read ({why}); expected a folder that pretrain or "
            "finetune wrote. Name such a folder"
        ) from error
    kind: Kind = "fine-tuning" if "pose" in config else "pre-training"
    if not _is_of_run(config):
        raise UserError(
            f"{folder.config_file} holds no configuration of a run; expected what pretrain or finetune wrote. Restore "
            "it, or name another run"
        )
    rows = [row for row in folder.read_metrics() if all(type(row.get(key)) in (int, float) for key in _CURVES[kind])]
    if not rows:
        raise UserError(
            f"{root} has no rows in metrics.jsonl: it has not trained yet, or it is a result of 'probe', which takes "
            "no steps. Name a run of pretrain or finetune"
        )
    evaluation_file = root / "evaluation" / "metrics.json"
    evaluation = read_json(evaluation_file) if evaluation_file.exists() else None
    name = root.name
    if kind == "fine-tuning":
        starts = {"random": "from scratch", "imagenet": "from ImageNet"}
        name = starts.get(config["encoder"]["weights"], "pre-trained")
    validations = folder.read_validations() if kind == "fine-tuning" else folder.read_probes()
    return Run(folder, kind, name, config, text, rows, validations, evaluation)


def sources_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables of the run's datasets."""
    return config["data"] if isinstance(config["data"], list) else [config["data"]]


def _is_of_run(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has all keys that a report shows."""
    try:
        sources = sources_of(config)
        words = [config["encoder"]["name"], config["encoder"]["weights"]]
        words += [source[key] for source in sources for key in ("root", "split", "source")]
        numbers = [config["train"]["batch"], config["geometry"]["side_px"]]
        numbers += [source["label_fraction"] for source in sources]
    except (KeyError, TypeError):
        return False
    return all(isinstance(word, str) for word in words) and all(type(number) in (int, float) for number in numbers)


def read_runs(roots: Sequence[Path]) -> list[Run]:
    """Read several runs; errors as in `read_run`. If two have the same name, the folder's name is added."""
    runs = [read_run(root) for root in roots]
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.name} ({run.folder.root.name})") if names.count(run.name) > 1 else run
        for run in runs
    ]


def measured(runs: Sequence[Run]) -> Measured | None:
    """The evaluations of the fine-tuned runs among `runs`; None if there is none.

    Two runs that were compared come first, with the results stored in the comparison. Other runs are added if they were
    measured on the same images with the same crop and alignment.
    """
    tuned = [run for run in runs if run.kind == "fine-tuning"]
    pair = next(((run, other) for run in tuned for other in tuned if _compares(run, other)), None)
    columns: list[tuple[Run, Mapping[str, Any]]] = []
    difference = None
    if pair is not None and (evaluation := pair[0].evaluation) is not None:
        difference = evaluation["comparison"]["difference"]
        columns = [(pair[0], evaluation), (pair[1], evaluation["comparison"]["other"])]
    elsewhere = []
    for run in tuned:
        if run.evaluation is None or any(run is shown for shown, _ in columns):
            continue
        if columns and _measured_on(run.evaluation) != _measured_on(columns[0][1]):
            elsewhere.append(run)
        else:
            columns.append((run, run.evaluation))
    if not columns:
        return None
    return Measured([run for run, _ in columns], [result for _, result in columns], difference, elsewhere)


def _measured_on(evaluation: Mapping[str, Any]) -> list[Any]:
    """What has to be equal for two evaluations to be compared: the images, and how they were cropped and aligned."""
    sources = [{**source, "box_margin": None} for source in evaluation.get("sources", ())]
    return [sources, *(evaluation[key] for key in ("data", "crop", "alignment", "images"))]


def _compares(run: Run, other: Run) -> bool:
    """Whether the evaluation of a run contains a comparison with the other."""
    if run.evaluation is None or "comparison" not in run.evaluation:
        return False
    return other.folder.root.resolve() in Path(run.evaluation["comparison"]["minus"]).resolve().parents


def read_json(file: Path) -> dict[str, Any]:
    """Read an object from a JSON file. A file that cannot be read, or is not an object, is a `UserError`."""
    try:
        content = json.loads(regular(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected a file of evaluate or predict. Run that command again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object; expected a file of evaluate or predict. Run that command again")
    return content

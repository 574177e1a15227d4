"""Reads the contents of a report from the folders of runs, evaluations and predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.folder import RunFolder

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run's folder.

    Attributes:
        name: displayed name: the starting weights of fine-tuning, or the folder's name.
        rows: rows of metrics.jsonl.
        validations: rows of validation.jsonl: validations of fine-tuning, probes of pre-training.
        evaluation: results of `evaluate`, or None.
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """Errors of a fine-tuned run, and of the run with which `evaluate --compare` compared it on the same images.

    Attributes:
        results: results of each run, see `peclr_dali.train.evaluation.report.results`.
        difference: paired difference of the two runs: metric -> value, low and high; None if there is one.
        unseen: evaluated runs that were not compared with the first, and are left out.
    """

    runs: Sequence[Run]
    results: Sequence[Mapping[str, Any]]
    difference: Mapping[str, Mapping[str, float | None]] | None = None
    unseen: Sequence[Run] = ()


def read_run(root: Path) -> Run:
    """Read a run of pre-training or fine-tuning.

    Raises:
        UserError: the folder is not a run's folder, or a file in it cannot be read.
    """
    folder = RunFolder(root, keep=1)
    if not (folder.config_file.exists() and folder.config_file.stat().st_size):
        raise UserError(
            f"{root} is not a run's folder: {folder.config_file.name} is missing or empty; expected a folder that "
            "pretrain or finetune wrote. Name such a folder"
        )
    config = folder.read_config()
    if isinstance(config, FinetuneConfig):
        starts = {"random": "from scratch", "imagenet": "from ImageNet"}
        name, curves = starts.get(config.encoder.weights, "pre-trained"), ["keypoints_px", "depth"]
    else:
        name, curves = root.name, ["positive_rank"]
    rows = [row for row in folder.read_metrics() if all(type(row.get(key)) in (int, float) for key in curves)]
    if not rows:
        raise UserError(
            f"{root} has no rows in metrics.jsonl: it has not trained yet, or it is a result of 'probe', which takes "
            "no steps. Name a run of pretrain or finetune"
        )
    evaluation = root / "evaluation" / "metrics.json"
    results = read_json(evaluation) if evaluation.exists() else None
    return Run(folder, name, config, rows, folder.read_validations(), results)


def read_runs(roots: Sequence[Path]) -> list[Run]:
    """Read several runs; errors as in `read_run`. If two have the same name, the folder's name is added."""
    runs = [read_run(root) for root in roots]
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.name} ({run.folder.root.name})") if names.count(run.name) > 1 else run
        for run in runs
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
    return Measured([run], [evaluation], unseen=[one for one, _ in evaluated[1:]])


def read_json(file: Path) -> dict[str, Any]:
    """Read an object from a JSON file. A file that cannot be read, or is not an object, is a `UserError`."""
    try:
        content = parse_json(regular(file).read_bytes())
        if not isinstance(content, dict):
            raise TypeError("it holds no JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected a file of evaluate or predict. Run that command again"
        ) from error
    return content

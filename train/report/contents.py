"""Reads the contents of a report from the folders of runs and their evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.folder import RunFolder

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

"""Experiments: networks pre-trained and fine-tuned in several ways, over several seeds, and compared in pairs.

Within a seed all arms see the same data and start from the same random numbers, and are measured on the same hands. So
what makes a seed or a hand hard is in both arms of a comparison and cancels in their difference.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from rich.table import Table
from scipy.stats import t as student

from bench.hardware import describe_machine
from errors import UserError
from pipelines.sources import load_index
from pipelines.synthetic import make_dataset
from train.config import Config, as_toml, load_config
from train.distributed import World
from train.evaluation.metrics import confidence_intervals, mean_over_hands, paired_difference
from train.finetune import finetune
from train.finetune_config import FinetuneConfig
from train.pose.inference import estimate_poses
from train.pose.run import PoseRun, load_pose_run
from train.pose.targets import PoseLabels
from train.pose.validation import Validation, error_tables
from train.pretrain import pretrain
from train.runs.folder import RunFolder
from train.runs.log import progress_bar

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Metric = Literal["epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arm:
    """One way to train.

    Attributes:
        set: keys of the run's configuration, as `--set` takes them, after those that all arms share.
        start: fine-tuning only: the arm of pre-training whose encoder it starts from; None starts as configured.
    """

    set: tuple[str, ...] = ()
    start: str | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Stage:
    """Pre-training or fine-tuning: what its arms share, and the arms.

    Attributes:
        config: TOML files, as `-c` takes them.
        set: keys that all arms share.
        arms: by name.
    """

    arms: dict[str, Arm]
    config: tuple[Path, ...] = ()
    set: tuple[str, ...] = ()


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Comparison:
    """What is claimed: that one arm of fine-tuning is better than another.

    Attributes:
        better: the arm that should win.
        than: the other.
        metric: by which.
    """

    better: str
    than: str
    metric: Metric = "pa_epe_cm"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExperimentConfig:
    """An experiment.

    Attributes:
        out: folder of its runs.
        data: folder of FreiHAND, or of rendered hands, which are made if the folder is not there.
        poses: rendered hands to make.
        pretrain: the stage of pre-training.
        finetune: the stage of fine-tuning, each arm of which is measured on the evaluation part.
        compare: the claims.
        seeds: of order, augmentation and weights, one experiment each.
        figures_of: which checkpoint is measured: the "last" or the "best" on validation.
    """

    pretrain: Stage
    finetune: Stage
    compare: tuple[Comparison, ...]
    out: Path = Path("runs/experiment")
    data: Path = Path(".data/hands")
    poses: Annotated[int, Field(ge=10)] = 800
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    figures_of: Literal["last", "best"] = "last"


@dataclass(frozen=True)
class Outcome:
    """A comparison over all seeds: `better` minus `than`.

    Attributes:
        better: see `Comparison`.
        than: likewise.
        metric: likewise.
        differences: of each seed.
        mean: over the seeds.
        low: end of the 95 % interval.
        high: likewise.
        holds: whether the whole interval lies on the winning side of zero.
    """

    better: str
    than: str
    metric: Metric
    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    holds: bool


def load_experiment(file: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment's TOML file.

    Raises:
        UserError: it cannot be read, or names an arm that there is not.
    """
    config = load_config(ExperimentConfig, [file], overrides)
    for name, arm in config.finetune.arms.items():
        if arm.start is not None and arm.start not in config.pretrain.arms:
            raise UserError(f"{file}: finetune.arms.{name}.start = {arm.start!r}: expected an arm of pretrain.arms")
    for claim in config.compare:
        for name in (claim.better, claim.than):
            if name not in config.finetune.arms:
                raise UserError(f"{file}: compare names {name!r}: expected an arm of finetune.arms")
    return config


def run_experiment(config: ExperimentConfig, record: Path | None) -> list[Outcome]:
    """Run what has not been run yet, seed by seed, and compare.

    Every run goes on where it was interrupted, so calling this again finishes an experiment.

    Args:
        config: the experiment.
        record: a row for each arm and seed, and one for each comparison, is appended to this file as it is measured.
    """
    if not config.data.exists():
        with progress_bar("rendering") as progress:
            make_dataset(config.data, poses=config.poses, seed=0, progress=progress)
    for seed in config.seeds:
        start = time.perf_counter()
        for name, arm in config.pretrain.arms.items():
            _pretrain(config, seed, name, arm)
        for name, arm in config.finetune.arms.items():
            row = _finetune(config, seed, name, arm)
            if row is not None and record is not None:
                _append(record, {"kind": "arm", **row, **describe_machine()})
        log.info("seed %d: %.1f minutes", seed, (time.perf_counter() - start) / 60)
    outcomes = [compare(config, claim) for claim in config.compare]
    if record is not None:
        for outcome in outcomes:
            row = {"kind": "comparison", "out": str(config.out), **dataclasses.asdict(outcome)}
            _append(record, {**row, "seeds": list(config.seeds), **describe_machine()})
    return outcomes


def _pretrain(config: ExperimentConfig, seed: int, name: str, arm: Arm) -> None:
    overrides = _overrides(config, config.pretrain, arm, seed, _folder(config, seed, "pretrain", name))
    pretrain(load_config(Config, config.pretrain.config, overrides), "auto")


def _finetune(config: ExperimentConfig, seed: int, name: str, arm: Arm) -> dict[str, Any] | None:
    """Fine-tune and measure one arm; None if that was done before."""
    folder = _folder(config, seed, "finetune", name)
    overrides = _overrides(config, config.finetune, arm, seed, folder)
    if arm.start is not None:
        overrides.append(f"encoder.weights={as_toml(str(_folder(config, seed, 'pretrain', arm.start)))}")
    settings = load_config(FinetuneConfig, config.finetune.config, overrides)
    start = time.perf_counter()
    run = finetune(settings, "auto")
    seconds = time.perf_counter() - start
    tables_file = _tables_file(config, seed, name)
    if tables_file.exists():
        return None
    tables = measure(load_pose_run(_last(run) if config.figures_of == "last" else folder), config.data)
    np.savez(tables_file, **tables)  # type: ignore[arg-type]
    figures = {metric: float(np.nanmean(mean_over_hands(table))) for metric, table in tables.items()}
    return {"out": str(config.out), "seed": seed, "arm": name, "set": overrides, "seconds": round(seconds), **figures}


def measure(run: PoseRun, data: Path) -> dict[str, Floats]:
    """Errors (N, 21) of a network on the evaluation part: every metric before its mean."""
    sources = run.config.data if isinstance(run.config.data, tuple) else (run.config.data,)
    source = dataclasses.replace(sources[0], root=str(data), part="evaluation", split="all", label_fraction=1.0)
    index = load_index(source)
    held_out = Validation(index, PoseLabels(index, run.config.pose))
    poses = estimate_poses(
        run.network, index, index.targets["K"], run.config.geometry, run.config.pipelines, batch=128, world=World()
    )
    return error_tables(poses, held_out)


def compare(config: ExperimentConfig, claim: Comparison) -> Outcome:
    """One arm against another over all seeds.

    The interval is Student's over the seeds, widened by what another set of hands would change: the variance of the
    mean over seeds plus that of the bootstrap over hands of the differences, which all seeds share.
    """
    better, than = ([_load_table(config, seed, name, claim.metric) for seed in config.seeds] for name in
                    (claim.better, claim.than))  # fmt: skip
    differences = [
        paired_difference({claim.metric: ours}, {claim.metric: theirs}, resamples=1)[claim.metric].value
        for ours, theirs in zip(better, than, strict=True)
    ]
    over_hands = confidence_intervals(
        {claim.metric: np.mean([ours - theirs for ours, theirs in zip(better, than, strict=True)], axis=0)}
    )[claim.metric]
    mean, count = float(np.mean(differences)), len(differences)
    if count == 1:
        low, high = float("-inf"), float("inf")  # one seed says nothing about others
    else:
        hands_error = (over_hands.high - over_hands.low) / (2 * 1.96)
        error = float(np.sqrt(np.var(differences, ddof=1) / count + hands_error**2))
        reach = float(student.ppf(0.975, count - 1)) * error
        low, high = mean - reach, mean + reach
    holds = low > 0 if claim.metric in ("auc", "pa_auc") else high < 0
    return Outcome(claim.better, claim.than, claim.metric, tuple(differences), mean, low, high, holds)


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """The comparisons for a terminal."""
    table = Table(title="better minus than, paired by seed and hand")
    for title in ("better", "than", "metric", "each seed", "mean", "95 % interval", "holds"):
        table.add_column(title)
    for row in outcomes:
        each = ", ".join(f"{difference:+.3f}" for difference in row.differences)
        interval = f"{row.low:+.3f} to {row.high:+.3f}"
        table.add_row(
            row.better, row.than, row.metric, each, f"{row.mean:+.3f}", interval, "yes" if row.holds else "no"
        )
    return table


def _overrides(config: ExperimentConfig, stage: Stage, arm: Arm, seed: int, folder: Path) -> list[str]:
    own = {"data.root": str(config.data), "run.out": str(folder), "run.seed": seed}
    return [*stage.set, *arm.set, *(f"{key}={as_toml(value)}" for key, value in own.items())]


def _folder(config: ExperimentConfig, seed: int, stage: str, name: str) -> Path:
    return config.out / f"seed_{seed}" / f"{stage}_{name}"


def _tables_file(config: ExperimentConfig, seed: int, name: str) -> Path:
    return _folder(config, seed, "errors", name).with_suffix(".npz")


def _load_table(config: ExperimentConfig, seed: int, name: str, metric: Metric) -> Floats:
    with np.load(_tables_file(config, seed, name)) as tables:
        table: Floats = tables[metric]
    return table


def _last(run: RunFolder) -> Path:
    path = run.checkpoints.latest()
    assert path is not None  # the last step writes one
    return path


def _append(record: Path, row: dict[str, Any]) -> None:
    with record.open("a") as file:
        file.write(json.dumps(row) + "\n")

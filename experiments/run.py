"""Experiments: networks pre-trained and fine-tuned in several ways, over several seeds, and compared in pairs.

Within a seed, all arms see the same data, use the same random numbers, and are measured on the same hands. So the
difficulty of a seed or a hand cancels in the difference of two arms.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from scipy.stats import norm
from scipy.stats import t as student

from bench.documentation import COMPARISON_HEADS, comparison_cells
from bench.rows import append, describe_machine, read_rows
from errors import UserError
from experiments.config import Comparison, ExperimentConfig, folder_of, settings_of_arm
from models.config import PoseConfig
from pipelines.sources import load_index
from synthetic import make_dataset
from train.config.finetuning import FinetuneConfig, FinetuneDataConfig
from train.config.pretraining import Config
from train.distributed.world import World
from train.finetune import finetune
from train.pose.inference import estimate_poses
from train.pose.labels import labels_to_learn
from train.pose.metrics import (
    align,
    confidence_intervals,
    in_one_place,
    mean_over_samples,
    paired_difference,
    pose_errors,
    score_tables,
)
from train.pose.pose_run import PoseRun, load_pose_run
from train.pose.sample_errors import errors_of
from train.pretrain import pretrain
from train.runs.log import progress_bar
from writing import write_text

log = logging.getLogger(__name__)

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]

_ALIGNMENTS = 5
"""Rounds of aligning all hands to their mean; two are enough to converge."""


def run_experiment(config: ExperimentConfig, record: Path | None) -> list[Row]:
    """Run all arms that have not finished, seed by seed, and return the rows of `compare`.

    Interrupted runs are continued, so a second call finishes an interrupted experiment.

    Args:
        config: the experiment.
        record: file to which rows are appended: for each arm and seed, the time of each seed, the constant predictions,
            and each comparison. A row that the file holds already is not repeated.
    """
    if not config.data.exists():
        with progress_bar("rendering") as progress:
            make_dataset(config.data, poses=config.poses, seed=0, scenes=config.scenes, progress=progress)
    for seed in config.seeds:
        rows = [_pretrain(config, seed, name) for name in config.pretrain.arms]
        rows += [_finetune(config, seed, name) for name in config.finetune.arms]
        took = {key: sum(row[key] for row in rows) for key in ("seconds", "cpu_seconds")}
        log.info(
            "seed %d: %.1f minutes, %.1f minutes of CPU time", seed, took["seconds"] / 60, took["cpu_seconds"] / 60
        )
        for row in [*rows, {"kind": "seed", "seed": seed, **took}]:
            _append(record, config, row)
    _append(record, config, {"kind": "constant", **measure_constants(config.data)})
    outcomes = [compare(config, claim) for claim in config.compare]
    if len(config.seeds) > 1:
        for outcome in outcomes:
            _append(record, config, outcome)
    return outcomes


def _pretrain(config: ExperimentConfig, seed: int, name: str) -> Row:
    settings, overrides = settings_of_arm(Config, config, name, seed)
    with _clock(Path(settings.run.out)) as took:
        pretrain(settings, "auto")
    return {"kind": "pretrain", "seed": seed, "arm": name, "set": overrides, **took}


def _finetune(config: ExperimentConfig, seed: int, name: str) -> Row:
    """Fine-tune and measure one arm. Returns its row, with the metrics on the evaluation part."""
    settings, overrides = settings_of_arm(FinetuneConfig, config, name, seed)
    folder = Path(settings.run.out)
    with _clock(folder) as took:
        run = finetune(settings, "auto")
        tables_file = _tables_file(config, seed, name)
        if not tables_file.exists():
            last = run.checkpoints.latest()
            assert last is not None  # the last step writes a checkpoint
            tables = measure_arm(load_pose_run(last if config.figures_of == "last" else folder), config.data)
            tables_file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(tables_file, **tables)  # type: ignore[arg-type]
    with np.load(tables_file) as measured:
        figures = {metric: float(np.nanmean(mean_over_samples(measured[metric]))) for metric in measured.files}
    return {"kind": "finetune", "seed": seed, "arm": name, "set": overrides, **took, **figures}


@contextmanager
def _clock(folder: Path) -> Iterator[dict[str, float]]:
    """Time a run over all calls: wall time and CPU time of all cores, in whole seconds.

    A call that finds a finished run adds nothing. The yielded dictionary is filled at the end.
    """
    file = folder.with_name(f"{folder.name}.clock.json")
    before = json.loads(file.read_text()) if file.exists() else {"seconds": 0.0, "cpu_seconds": 0.0, "finished": False}
    took: dict[str, float] = {}
    wall, cpu, finished = time.perf_counter(), time.process_time(), False
    try:
        yield took
        finished = True
    finally:
        if not before["finished"]:
            before["seconds"] += time.perf_counter() - wall
            before["cpu_seconds"] += time.process_time() - cpu
            before["finished"] = finished
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(before))
        took.update({key: round(before[key]) for key in ("seconds", "cpu_seconds")})


def measure_arm(run: PoseRun, data: Path) -> dict[str, Floats]:
    """Errors (N, K) of a network on the evaluation part, per metric, before the mean."""
    sources = run.config.data if isinstance(run.config.data, tuple) else (run.config.data,)
    source = dataclasses.replace(sources[0], root=str(data), part="evaluation", split="all", label_fraction=1.0)
    index = load_index(source)
    labels = labels_to_learn(index, run.config.pose)
    poses = estimate_poses(run.network, index, labels.intrinsics, run.config, World())
    return errors_of(poses, labels[poses.samples], palm=run.config.pose.first_keypoint == "palm").tables()


def measure_constants(data: Path) -> dict[str, float]:
    """Errors of two constant predictions on the evaluation part, see `constant_errors`."""
    source = FinetuneDataConfig(root=str(data), split="train", versions=("gs",))
    known, held_out = (
        labels_to_learn(load_index(one), PoseConfig()).joints.astype(np.float64)
        for one in (source, dataclasses.replace(source, part="evaluation", split="all"))
    )
    return constant_errors(known, held_out)


def constant_errors(known_m: Floats, held_out_m: Floats) -> dict[str, float]:
    """PA-EPE in cm of two constant predictions.

    "mean_pose" is the mean of the joints relative to the wrist: the prediction of a network that has learnt nothing.
    "rigid_hand" is the mean of the hands after alignment to each other; the metric aligns it to each hand.

    Args:
        known_m: (N, K, 3) hands whose mean is taken, in metres. Labels that are a single point, or not finite, are
            left out.
        held_out_m: (M, 21, 3) hands to measure on, in metres, with the same exception.

    Raises:
        UserError: no hand is left.
    """
    known_m, held_out_m = _hands_of_some_size(known_m), _hands_of_some_size(held_out_m)
    known_m = known_m - known_m[:, :1]
    rigid = known_m[0]
    for _ in range(_ALIGNMENTS):
        rigid = align(known_m, np.broadcast_to(rigid, known_m.shape)).mean(axis=0)
    errors = {
        f"{name}_pa_epe_cm": score_tables(pose_errors(np.broadcast_to(pose, held_out_m.shape), held_out_m))["pa_epe_cm"]
        for name, pose in (("mean_pose", known_m.mean(axis=0)), ("rigid_hand", rigid))
    }
    return {name: float(np.nanmean(mean_over_samples(table))) for name, table in errors.items()}


def _hands_of_some_size(hands_m: Floats) -> Floats:
    known: npt.NDArray[np.bool_] = np.asarray(np.isfinite(hands_m).all(axis=2))
    kept: Floats = hands_m[known.all(axis=1) & ~in_one_place(hands_m, known)]
    if not len(kept):
        raise UserError(
            f"all {len(hands_m)} labels are a single point or not finite: expected hands. Use another dataset"
        )
    return kept


def compare(config: ExperimentConfig, claim: Comparison) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The claim "holds" if the whole interval
    is on the better side of zero. The interval is Student's. Its variance is the sum of the variance of the mean over
    seeds and the variance of the bootstrap over hands, which all seeds share.
    """
    better, than = (
        [np.load(_tables_file(config, seed, name))[claim.metric] for seed in config.seeds]
        for name in (claim.better, claim.than)
    )
    differences = [
        paired_difference({claim.metric: ours}, {claim.metric: theirs}, resamples=1)[claim.metric].value
        for ours, theirs in zip(better, than, strict=True)
    ]
    over_hands = confidence_intervals({claim.metric: np.mean(np.subtract(better, than), axis=0)})[claim.metric]
    mean, count = float(np.mean(differences)), len(differences)
    if count == 1:
        low, high = float("-inf"), float("inf")  # one seed gives no interval
    else:
        hands_error = (over_hands.high - over_hands.low) / (2 * norm.ppf(0.975))
        error = float(np.sqrt(np.var(differences, ddof=1) / count + hands_error**2))
        reach = float(student.ppf(0.975, count - 1)) * error
        low, high = mean - reach, mean + reach
    holds = low > 0 if claim.metric in ("auc", "pa_auc") else high < 0
    figures = {"differences": differences, "mean": mean, "low": low, "high": high, "holds": holds}
    return {"kind": "comparison", **dataclasses.asdict(claim), **figures, "seeds": config.seeds}


def as_table(outcomes: Sequence[Row]) -> Table:
    """The comparisons as a table for the terminal."""
    table = Table(*COMPARISON_HEADS, title="better minus than, paired by seed and hand")
    for row in outcomes:
        table.add_row(*comparison_cells(row))
    return table


def _tables_file(config: ExperimentConfig, seed: int, name: str) -> Path:
    return folder_of(config, seed, "errors", name).with_suffix(".npz")


def _append(record: Path | None, config: ExperimentConfig, own: Row) -> None:
    """Append a row to a file, unless the file holds it already."""
    if record is None:
        return
    row = json.loads(json.dumps({"bench": "experiment", "out": str(config.out), **own}))  # as reading it back gives it
    known = read_rows(record) if record.exists() else []
    if any(row == {key: value for key, value in other.items() if key != "machine"} for other in known):
        return
    append(record, {**row, "machine": describe_machine()})

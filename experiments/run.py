"""Runs a study: networks pre-trained and measured in several ways, over several seeds, and compared in pairs.

Within a seed, all arms see the same data, use the same random numbers, and are measured on the same hands. So the
difficulty of a seed or a hand cancels in the difference of two arms.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from scipy.stats import norm
from scipy.stats import t as student

from bench.rows import append, describe_machine, read_rows
from bench.studies.rows import COMPARISON_HEADS, comparison_cells
from errors import UserError
from experiments.config import Claim, Maps, Plan, Render
from experiments.maps import measure_maps
from models.config import PoseConfig
from pipelines.sources import load_index
from synthetic import is_unfinished, make_dataset
from train.config.finetuning import FinetuneConfig, FinetuneDataConfig
from train.config.load import load_config
from train.config.pretraining import Config
from train.distributed.world import World, described_world
from train.evaluation.network_errors import evaluation_config, measure
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
from train.pretrain import pretrain
from train.probe.read_out import fit_read_out
from train.runs.checkpoint import Checkpoints
from train.runs.log import progress_bar
from writing import whole_file, write_text

log = logging.getLogger(__name__)

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]

_ALIGNMENTS = 5
"""Rounds of aligning all hands to their mean; two are enough to converge."""


def run_study(plan: Plan, record: Path | None) -> list[Row]:
    """Run all arms that have not finished, seed by seed, and return the rows of `compare`.

    Interrupted runs are continued, so a second call finishes an interrupted study.

    Args:
        plan: the study at one scale.
        record: file to which rows are appended: for each arm and seed, the time of each seed, the constant predictions,
            the maps, and each comparison. A row that the file holds already is not repeated.
    """
    for dataset in plan.used_data().values():
        if dataset.render is not None:
            _render(Path(dataset.root), dataset.render)
    for seed in plan.study.seeds:
        rows = [_pretrain(plan, seed, name) for name in plan.pretrain]
        rows += [_measure(plan, seed, name) for name in plan.arms]
        if plan.study.maps is not None:
            rows += [_map(plan, plan.study.maps, seed, name) for name in (plan.study.maps.better, plan.study.maps.than)]
        took = {key: sum(row.get(key, 0) for row in rows) for key in ("seconds", "cpu_seconds")}
        log.info(
            "seed %d: %.1f minutes, %.1f minutes of CPU time", seed, took["seconds"] / 60, took["cpu_seconds"] / 60
        )
        for row in [*rows, {"kind": "seed", "seed": seed, **took}]:
            _append(record, plan, row)
    _append(record, plan, {"kind": "constant", **measure_constants(plan.held_out(next(iter(plan.arms))))})
    outcomes = [compare(plan, claim) for claim in plan.compare]
    if len(plan.study.seeds) > 1:
        for outcome in outcomes:
            _append(record, plan, outcome)
    return outcomes


def _render(root: Path, render: Render) -> None:
    """Render a dataset that does not exist or is not finished. A second process waits for the first."""
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(root.with_name(f"{root.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists() or is_unfinished(root):
            with progress_bar(f"rendering {root}") as progress:
                make_dataset(root, progress=progress, **dataclasses.asdict(render))
    finally:
        os.close(lock)


def _pretrain(plan: Plan, seed: int, name: str) -> Row:
    settings, overrides = plan.settings(Config, name, seed)
    with _clock(Path(settings.run.out)) as took:
        pretrain(settings, "auto")
    return {"kind": "pretrain", "seed": seed, "arm": name, "set": overrides, **took}


def _measure(plan: Plan, seed: int, name: str) -> Row:
    """Train or read out one arm, if it has a network of its own, and measure it. Returns its row, with the metrics."""
    row: Row = {"kind": "arm", "seed": seed, "arm": name, "by": plan.at.by, "on": plan.measured_on(name)}
    took: dict[str, float] = {}
    tables_file = _tables_file(plan, seed, name)
    with ExitStack() as timed:
        if plan.arms[name].network is None:
            settings, row["set"] = plan.settings(FinetuneConfig, name, seed)
            took = timed.enter_context(_clock(Path(settings.run.out)))
            (finetune if plan.at.by == "finetune" else fit_read_out)(settings, "auto")
        if not tables_file.exists():
            tables = measure_arm(_network_of(plan, seed, name), plan.held_out(name))
            tables_file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(tables_file) as file:
                np.savez(file, **tables)  # type: ignore[arg-type]
    with np.load(tables_file) as measured:
        figures = {metric: float(np.nanmean(mean_over_samples(measured[metric]))) for metric in measured.files}
    return {**row, **took, **figures}


def _map(plan: Plan, maps: Maps, seed: int, name: str) -> Row:
    """The equivariance errors of an arm."""
    file = plan.folder(seed, "map", name).with_suffix(".json")
    if not file.exists():
        found = measure_maps(_network_of(plan, seed, name), plan.held_out(name), maps)
        write_text(file, json.dumps(found))
    return {"kind": "map", "seed": seed, "arm": name, **json.loads(file.read_text())}


def _network_of(plan: Plan, seed: int, name: str) -> PoseRun:
    folder = plan.run_of(name, seed)
    last = Checkpoints(folder / "checkpoints", keep=1).latest() if plan.study.figures_of == "last" else None
    return load_pose_run(last or folder)


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


def measure_arm(run: PoseRun, overrides: Sequence[str]) -> dict[str, Floats]:
    """Errors (N, K) of a network on the images that `overrides` choose, per metric, before the mean."""
    config = evaluation_config(run, (), overrides)
    index = load_index(config.data)
    labels = labels_to_learn(index, config.pose)
    world = World(device=described_world(config.train.device).device)  # each process measures all images
    with progress_bar("measuring") as progress:
        poses = estimate_poses(run.network, index, labels.intrinsics, config, world, progress=progress)
    return measure(run, config, index, labels, poses).tables()


def measure_constants(overrides: Sequence[str]) -> dict[str, float]:
    """Errors of two constant predictions on the images that `overrides` choose, see `constant_errors`.

    They are made from the dataset's training split. Without hands that are wholly known in 3D, there are none.
    """
    held_out = load_config(FinetuneConfig, (), overrides).data
    assert isinstance(held_out, FinetuneDataConfig)
    source = dataclasses.replace(held_out, part="training", split="train")
    try:
        known, measured = (labels_to_learn(load_index(one), PoseConfig()) for one in (source, held_out))
    except UserError:  # the dataset is for evaluation only
        return {}
    if not (known.in_metres and measured.in_metres):
        return {}
    return constant_errors(known.joints.astype(np.float64), measured.joints.astype(np.float64))


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


def compare(plan: Plan, claim: Claim) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The claim "holds" if the whole interval
    is on the better side of zero. The interval is Student's. Its variance is the sum of the variance of the mean over
    seeds and the variance of the bootstrap over hands, which all seeds share.
    """
    better, than = (
        [_table(plan, seed, name, claim.metric) for seed in plan.study.seeds] for name in (claim.better, claim.than)
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
    names = {"better": claim.better, "than": claim.than, "metric": claim.metric}
    return {"kind": "comparison", **names, **figures, "seeds": plan.study.seeds}


def as_table(outcomes: Sequence[Row]) -> Table:
    """The comparisons as a table for the terminal."""
    table = Table(*COMPARISON_HEADS, title="better minus than, paired by seed and hand")
    for row in outcomes:
        table.add_row(*comparison_cells(row))
    return table


def _table(plan: Plan, seed: int, name: str, metric: str) -> Floats:
    """The errors (N, K) of an arm in a metric."""
    with np.load(_tables_file(plan, seed, name)) as tables:
        if metric not in tables.files:
            measured = ", ".join(tables.files)
            raise UserError(
                f"{plan.file}: compare: {metric} of {name} cannot be measured on {plan.measured_on(name)}, whose "
                f"labels allow {measured}: compare in another metric"
            )
        found: Floats = tables[metric]
    return found


def _tables_file(plan: Plan, seed: int, name: str) -> Path:
    return plan.folder(seed, f"errors_{plan.at.by}", name).with_suffix(".npz")


def _append(record: Path | None, plan: Plan, own: Row) -> None:
    """Append a row to a file, unless the file holds it already."""
    if record is None:
        return
    # As reading it back gives it.
    row = json.loads(json.dumps({"bench": "experiment", "study": plan.name, "scale": plan.scale, **own}))
    known = read_rows(record) if record.exists() else []
    if any(row == {key: value for key, value in other.items() if key != "machine"} for other in known):
        return
    append(record, {**row, "machine": describe_machine()})

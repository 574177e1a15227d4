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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.rows import append, describe_machine, read_rows
from errors import UserError
from experiments.compare import Row, compare
from experiments.config import Maps, Plan, Render
from experiments.maps import measure_maps
from experiments.measure import measure_constants, measured_errors, measured_from, network_file
from synthetic import is_rendered, make_dataset
from train.config.finetuning import FinetuneConfig
from train.config.pretraining import Config
from train.finetune import finetune
from train.pose.pose_run import load_pose_run
from train.pretrain import pretrain
from train.probe.read_out import fit_read_out
from train.runs.checkpoint import find_checkpoint, seal_of
from train.runs.log import progress_bar
from writing import write_text

log = logging.getLogger(__name__)


def run_study(plan: Plan, record: Path | None) -> list[Row]:
    """Run all arms that have not finished, seed by seed, and return the rows of `compare`.

    Interrupted runs are continued, so a second call finishes an interrupted study.

    Args:
        plan: the study at one scale.
        record: file to which rows are appended: for each arm and seed, the constant predictions, the maps, and each
            comparison. A row that equals the newest one of its kind is not repeated.
    """
    for dataset in plan.used_data().values():
        if dataset.render is not None:
            _render(Path(dataset.root), dataset.render)
    for seed in plan.study.seeds:
        rows = [_pretrain(plan, seed, name) for name in plan.pretrain]
        rows += [_measure(plan, seed, name) for name in plan.arms]
        if plan.maps is not None:
            rows += [_map(plan, plan.maps, seed, name) for name in (plan.maps.better, plan.maps.than)]
        took = {key: sum(row.get(key, 0) for row in rows) for key in ("seconds", "cpu_seconds")}
        log.info(
            "seed %d: %.1f minutes, %.1f minutes of CPU time", seed, took["seconds"] / 60, took["cpu_seconds"] / 60
        )
        for row in rows:
            _append(record, plan, row)
    if record is not None and (constants := measure_constants(plan.held_out(plan.first_arm))):
        _append(record, plan, {"kind": "constant", "on": plan.measured_on(plan.first_arm), **constants})
    outcomes = [compare(plan, claim) for claim in plan.compare]
    if len(plan.study.seeds) > 1:
        for outcome in outcomes:
            _append(record, plan, outcome)
    return outcomes


def _render(root: Path, render: Render) -> None:
    """Render a dataset, unless it is finished or the folder holds another one. A second process waits for the first."""
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(root.with_name(f"{root.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists() or is_rendered(root):
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
    with ExitStack() as timed:
        if plan.arms[name].network is None:
            settings, row["set"] = plan.settings(FinetuneConfig, name, seed)
            _require_same_start(plan, seed, name)
            took = timed.enter_context(_clock(Path(settings.run.out)))
            (finetune if plan.at.by == "finetune" else fit_read_out)(settings, "auto")
        found = measured_errors(plan, seed, name)
    return {**row, **took, **found.means()}


def _require_same_start(plan: Plan, seed: int, name: str) -> None:
    """Refuse a run that was trained from another encoder than the one its pre-training holds now."""
    start, folder = plan.arms[name].start, plan.run_of(name, seed)
    if start is None:
        return
    pretrained = plan.folder(seed, "pretrain", start)
    seal = seal_of(find_checkpoint(pretrained, "a run of this study"))
    file = folder.with_name(f"{folder.name}.start")
    if folder.exists() and file.exists() and file.read_text() != seal:
        raise UserError(f"{folder} was trained from another encoder than {pretrained} holds now: remove {folder}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, seal)


def _map(plan: Plan, maps: Maps, seed: int, name: str) -> Row:
    """The equivariance errors of an arm."""
    file = plan.folder(seed, "map", name).with_suffix(".json")
    made_from = [measured_from(plan, seed, name), maps.rotations, maps.translations]
    saved = json.loads(file.read_text()) if file.exists() else {}
    if saved.pop("made_from", None) != made_from:
        saved = measure_maps(load_pose_run(network_file(plan, seed, name)), plan.held_out(name), maps)
        write_text(file, json.dumps({**saved, "made_from": made_from}))
    return {"kind": "map", "seed": seed, "arm": name, **saved}


@contextmanager
def _clock(folder: Path) -> Iterator[dict[str, float]]:
    """Time a run over all calls: wall time and CPU time of all cores, in whole seconds.

    A call that finds a finished run adds nothing; a run whose folder was removed is timed anew. The yielded dictionary
    is filled at the end; it stays empty for a run that other commands began, such as those of `--list`.
    """
    file = folder.with_name(f"{folder.name}.clock.json")
    before = {"seconds": 0.0, "cpu_seconds": 0.0, "finished": False}
    took: dict[str, float] = {}
    if folder.exists():
        if not file.exists():
            yield took
            return
        before = json.loads(file.read_text())
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


_SUBJECT = ("study", "scale", "kind", "seed", "arm", "better", "than", "metric")
"""Keys that say what a row is about. Of rows with the same values, the newest counts."""


def _append(record: Path | None, plan: Plan, own: Row) -> None:
    """Append a row to a file, unless it equals the newest one about the same."""
    if record is None:
        return
    # As reading it back gives it.
    row = json.loads(json.dumps({"bench": "experiment", "study": plan.name, "scale": plan.scale, **own}))
    for other in reversed(list(read_rows(record)) if record.exists() else []):
        if all(other.get(key) == row.get(key) for key in _SUBJECT):
            if row == {key: value for key, value in other.items() if key != "machine"}:
                return
            break
    append(record, {**row, "machine": describe_machine()})

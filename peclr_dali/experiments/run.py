"""Runs a study: networks pre-trained and measured in several ways, over several seeds, and compared in pairs.

Within a seed, all arms see the same data, use the same random numbers, and are measured on the same hands. So the
difficulty of a seed or a hand cancels in the difference of two arms.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import re
from pathlib import Path

import numpy as np

from peclr_dali.bench.rows import append, describe_machine, read_rows
from peclr_dali.errors import UserError
from peclr_dali.experiments.compare import Row, compare
from peclr_dali.experiments.config import Plan, Render
from peclr_dali.experiments.measure import (
    checksum,
    damage_in_one_line,
    measure_constants,
    measured_errors,
    measured_maps,
    require_held_out,
)
from peclr_dali.parsing import regular
from peclr_dali.synthetic import is_rendered, make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.metrics import METRICS, metric_of
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.read_out import fit_read_out
from peclr_dali.train.runs.checkpoint import find_checkpoint
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import write_text


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
    require_held_out(plan)
    pretrained = set()
    for seed in plan.study.seeds:
        if (start := plan.pretrain_seed(seed)) not in pretrained:
            for name in plan.pretrain:
                config, keys = plan.settings(Config, name, start)
                pretrain(config, "auto")
                probes = _probes(Path(config.run.out))
                _append(record, plan, {"kind": "pretrain", "seed": start, "arm": name, "set": keys, **probes})
            pretrained.add(start)
        for name in plan.arms:
            _append(record, plan, _measure(plan, seed, name))
        if (maps := plan.maps) is not None:
            for name in (maps.better, maps.than):
                errors = {key: array.tolist() for key, array in measured_maps(plan, maps, seed, name).items()}
                _append(record, plan, {"kind": "map", "seed": seed, "arm": name, **errors})
    if record is not None and (constants := _constants(plan)):
        _append(record, plan, {"kind": "constant", "on": plan.measured_on(plan.first_arm), **constants})
    outcomes = []
    for claim in plan.compare:
        outcomes.append(compare(plan, claim))
        if math.isfinite(outcomes[-1]["low"]):
            _append(record, plan, outcomes[-1])
    return outcomes


def _render(root: Path, render: Render) -> None:
    """Render a dataset, unless it is finished or the folder holds another one. A second process waits for the first."""
    if root.exists() and not is_rendered(root) and not (root.is_dir() and not any(root.iterdir())):
        return
    beside = root.absolute()
    beside = beside.with_name(f"{beside.name}.lock")
    beside.parent.mkdir(parents=True, exist_ok=True)
    if beside.exists():
        regular(beside)  # a pipe would wait for a reader
    with beside.open("a") as lock, progress_bar(f"rendering {root}") as progress:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists() or is_rendered(root):
            make_dataset(root, progress=progress, **dataclasses.asdict(render))


def _measure(plan: Plan, seed: int, name: str) -> Row:
    """Train or read out one arm, if it has a network of its own, and measure it. Returns its row, with the metrics."""
    row: Row = {"kind": "arm", "seed": seed, "arm": name, "by": plan.by(name), "on": plan.measured_on(name)}
    if plan.arms[name].network is None:
        config, row["set"] = plan.settings(FinetuneConfig, name, seed)
        _require_same_start(plan, seed, name)
        (finetune if plan.by(name) == "finetune" else fit_read_out)(config, "auto")
    errors = measured_errors(plan, seed, name)
    row |= {"true_root": True} if plan.by(name) == "probe" else {}
    return row | {metric: metric_of(table) for metric, table in errors.items() if metric in METRICS}


def _probes(run: Path) -> Row:
    """The linear probe during a run of pre-training, in pixels of 224: steps, errors, and a constant's error."""
    rows = RunFolder(run, keep=1).read_probes()
    if not rows:
        return {}
    errors = {"probe_step": [row["step"] for row in rows], "probe_epe_px": [row["epe_px_of_224"] for row in rows]}
    return errors | {"probe_constant_epe_px": rows[-1].get("constant_epe_px_of_224")}


def _require_same_start(plan: Plan, seed: int, name: str) -> None:
    """Refuse a run that was trained from another encoder than the one its pre-training holds now."""
    start, folder = plan.arms[name].start, plan.run_of(name, seed)
    if start is None:
        return
    pretrained = plan.pretrained(start, seed)
    encoder = checksum(find_checkpoint(pretrained, "a run of this study"))
    file = folder.with_name(f"{folder.name}.encoder")
    if folder.exists() and file.exists():
        with damage_in_one_line(file):
            before = regular(file).read_text()
            if not re.fullmatch("[0-9a-f]{8}", before):
                raise ValueError("it holds no checksum")
        if before != encoder:
            raise UserError(f"{folder} was trained from another encoder than {pretrained} holds now: remove {folder}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, encoder)


def _constants(plan: Plan) -> dict[str, float]:
    """The mean of `measure_constants` over the images that are held out with each seed."""
    chosen = {tuple(plan.held_out(plan.first_arm, seed)) for seed in plan.study.seeds}
    found = [measure_constants(overrides) for overrides in sorted(chosen)]
    return {key: float(np.mean([errors[key] for errors in found])) for key in found[0]}


_SUBJECT = ("study", "scale", "kind", "seed", "arm", "better", "than", "metric")
"""Keys that say what a row is about. Of rows with the same values, the newest counts."""


def _append(record: Path | None, plan: Plan, figures: Row) -> None:
    """Append a row to a file, unless it equals the newest one about the same."""
    if record is None:
        return
    row = {"bench": "experiment", "study": plan.name, "scale": plan.scale, **figures}
    row = json.loads(json.dumps(row))  # as reading it back gives it
    same = (
        old
        for old in reversed(read_rows(record) if record.exists() else [])
        if all(old.get(key) == row.get(key) for key in _SUBJECT)
    )
    newest = {key: value for key, value in next(same, Row()).items() if key != "machine"}
    if row != newest:
        append(record, row | {"machine": describe_machine()})

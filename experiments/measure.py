"""Measures the networks of a study on held-out hands, and the constant predictions beside which they are seen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from errors import UserError
from experiments.config import Plan
from models.config import PoseConfig
from pipelines.sources import load_index
from train.config.finetuning import FinetuneConfig, FinetuneDataConfig
from train.config.load import load_config
from train.distributed.world import single_process
from train.evaluation.constants import constant_pose_errors
from train.evaluation.network_errors import evaluation_config, measure
from train.pose.inference import estimate_poses
from train.pose.labels import labels_to_learn
from train.pose.metrics import mean_over_samples
from train.pose.pose_run import PoseRun, load_pose_run
from train.runs.checkpoint import CHECKPOINTS, Checkpoints, find_checkpoint, seal_of
from train.runs.log import progress_bar
from writing import whole_file

Floats = npt.NDArray[np.float64]


class Errors(NamedTuple):
    """Errors of a network on N images.

    Attributes:
        tables: metric -> (N, K), before the mean.
        groups: (N,) group numbers, as for `confidence_intervals`; None: each image is its own group.
    """

    tables: dict[str, Floats]
    groups: npt.NDArray[np.int64] | None

    def means(self) -> dict[str, float]:
        """The metrics."""
        return {metric: float(np.nanmean(mean_over_samples(table))) for metric, table in self.tables.items()}


def measured_errors(plan: Plan, seed: int, name: str) -> Errors:
    """The errors of an arm. They are kept in a file, and measured again if the network or the images are others."""
    file, made_from = errors_file(plan, seed, name), measured_from(plan, seed, name)
    if not file.exists() or _saved(file)[1] != made_from:
        found = measure_arm(load_pose_run(network_file(plan, seed, name)), plan.held_out(name))
        file.parent.mkdir(parents=True, exist_ok=True)
        groups = {} if found.groups is None else {"groups": found.groups}
        with whole_file(file) as out:
            np.savez(out, made_from=made_from, **groups, **found.tables)  # type: ignore[arg-type]
    return _saved(file)[0]


def read_errors(plan: Plan, seed: int, name: str) -> Errors:
    """The errors of an arm that has been measured."""
    return _saved(errors_file(plan, seed, name))[0]


def _saved(file: Path) -> tuple[Errors, str]:
    with np.load(file) as saved:
        arrays = {key: saved[key] for key in saved.files}
    made_from, groups = str(arrays.pop("made_from", "")), arrays.pop("groups", None)
    return Errors(arrays, groups), made_from


def errors_file(plan: Plan, seed: int, name: str) -> Path:
    """Where the errors of an arm are kept."""
    return plan.folder(seed, f"errors_{plan.at.by}", name).with_suffix(".npz")


def measured_from(plan: Plan, seed: int, name: str) -> str:
    """What determines the errors of an arm: the network's checksum and the images."""
    return json.dumps([seal_of(network_file(plan, seed, name)), *plan.held_out(name)])


def network_file(plan: Plan, seed: int, name: str) -> Path:
    """The checkpoint that is measured."""
    folder = plan.run_of(name, seed)
    last = Checkpoints(folder / CHECKPOINTS, keep=1).latest() if plan.study.figures_of == "last" else None
    return last or find_checkpoint(folder, "a run of this study")


def measure_arm(run: PoseRun, overrides: Sequence[str]) -> Errors:
    """Errors of a network on the images that `overrides` choose."""
    config = evaluation_config(run, (), overrides)
    index = load_index(config.data)
    labels = labels_to_learn(index, config.pose)
    world = single_process(config.train.device)
    with progress_bar("measuring") as progress:
        poses = estimate_poses(run.network, index, labels.intrinsics, config, world, progress=progress)
    return Errors(measure(run, config, index, labels, poses).tables(), index.group)


def measure_constants(overrides: Sequence[str]) -> dict[str, float]:
    """Errors of two constant predictions on the images that `overrides` choose, see `constant_pose_errors`.

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
    errors = constant_pose_errors(known.joints.astype(np.float64), measured.joints.astype(np.float64))
    return {
        "mean_pose_pa_epe_cm": errors["mean_pose"]["pa_epe_cm"],
        "rigid_hand_pa_epe_cm": errors["rigid_pose"]["pa_epe_cm"],
    }

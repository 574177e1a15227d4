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
from train.distributed.world import alone
from train.evaluation.network_errors import evaluation_config, measure
from train.pose.inference import estimate_poses
from train.pose.labels import labels_to_learn
from train.pose.metrics import align, in_one_place, mean_over_samples, pose_errors, score_tables
from train.pose.pose_run import PoseRun, load_pose_run
from train.runs.checkpoint import CHECKPOINTS, Checkpoints, find_checkpoint, seal_of
from train.runs.log import progress_bar
from writing import whole_file

Floats = npt.NDArray[np.float64]

_ALIGNMENTS = 5
"""Rounds of aligning all hands to their mean; two are enough to converge."""


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
    world = alone(config.train.device)
    with progress_bar("measuring") as progress:
        poses = estimate_poses(run.network, index, labels.intrinsics, config, world, progress=progress)
    return Errors(measure(run, config, index, labels, poses).tables(), index.group)


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

"""Measures the networks of a study on held-out hands, and compares them in pairs, by seed and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.bench.studies.study import Claim, Study
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.errors import evaluation_config, evaluation_constants, mean_keypoints_px, measure
from peclr_dali.train.pose.inference import Poses, estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.metrics import METRICS, confidence_intervals, metric_of
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import whole_file

Arrays = dict[str, npt.NDArray[Any]]
Row = dict[str, Any]

ANGLES_DEG: Final = np.linspace(-80, 80, 17)
SHIFTS_PX: Final = np.linspace(-25, 25, 5)
SIDE_PX: Final = 128.0
"""Places of the maps: angles, and shifts along each axis in pixels of a view of 128, the paper's. It shows a range of
shifts as large as this."""


def compare(study: Study, claim: Claim) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The half of its width is the root of the
    sum of two squares: of Student's interval over the seeds, and of the bootstrap's over the hands. Seeds that start
    from one pre-training are no independent trials: they count as one, with their mean. One trial has an
    interval without ends.

    The claim "holds" if the whole interval is on the better side of zero. It counts only if both arms are better than
    all constant predictions: "beats_constants", None if there are none in this metric. "better_by_percent" is relative
    to the second arm's error, or to the first arm's AUC, as in the paper.
    """
    metric, sign = claim.metric, 1 if METRICS[claim.metric].higher_is_better else -1
    better, than = ([measured(study, seed, name) for seed in study.seeds] for name in (claim.better, claim.than))
    tables = [ours[metric] - theirs[metric] for ours, theirs in zip(better, than, strict=True)]
    differences = [metric_of(table) for table in tables]
    of_start: dict[int, list[float]] = {}
    for seed, difference in zip(study.seeds, differences, strict=True):
        of_start.setdefault(study.start_seed(seed), []).append(difference)
    mean, reach = float(np.mean(differences)), math.inf
    if len(of_start) > 1:
        trials = interval_of_mean([float(np.mean(of_one)) for of_one in of_start.values()])
        hands = confidence_intervals({metric: np.mean(tables, axis=0)}, groups=better[0]["groups"])[metric]
        reach = math.hypot(trials.high - trials.value, (hands.high - hands.low) / 2)
    levels = [float(np.mean([metric_of(errors[metric]) for errors in of_arm])) for of_arm in (better, than)]
    constants = measure_constants(*study.held_out(claim.better)).values()
    margins = [sign * (level - known[metric]) for level in levels for known in constants if metric in known]
    return {
        "kind": "comparison", "better": claim.better, "than": claim.than, "metric": metric, "differences": differences,
        "mean": mean, "low": mean - reach, "high": mean + reach, "holds": sign * mean > reach,
        "better_by_percent": 100 * sign * mean / levels[0 if sign > 0 else 1], "published_percent": claim.percent,
        "beats_constants": min(margins) > 0 if margins else None, "seeds": [*study.seeds],
    }  # fmt: skip


def measured(study: Study, seed: int, name: str, what: Literal["errors", "map"] = "errors") -> Arrays:
    """What `measure_errors` or `measure_maps` gives for an arm's network. It is kept in a file in the run's folder."""
    out = study.measurement(name, seed).out
    file = out / f"{what}_{name}.npz"
    if not file.exists():
        network = RunFolder(out, keep=1).checkpoints.latest()
        assert network is not None  # it was trained before
        measured_by = measure_errors if what == "errors" else measure_maps
        with whole_file(file) as opened:
            np.savez(opened, **measured_by(load_pose_run(network), study.held_out(name)))  # type: ignore[arg-type]
    with np.load(file) as saved:
        return dict(saved)


class HeldOut:
    """A network and the images to measure it on, as `evaluation_config` chooses them."""

    def __init__(self, run: PoseRun, overrides: Sequence[str]) -> None:
        self.run, self.config = run, evaluation_config(run, (), overrides)
        self.index = load_index(self.config.data)
        self.labels = labels_to_learn(self.index)

    def poses(self, index: Index, **options: Any) -> Poses:
        """The poses that the network predicts, for this index or one with other boxes."""
        world = single_process(self.config.train.device)
        return estimate_poses(self.run.network, index, self.labels.intrinsics, self.config, world, **options)


def measure_errors(run: PoseRun, overrides: Sequence[str]) -> Arrays:
    """Errors of a network on N held-out images.

    Returns:
        The table (N, K) of each metric that the labels allow, before the mean; and "groups", (N,) group numbers, as for
        `confidence_intervals`.
    """
    images = HeldOut(run, overrides)
    with progress_bar("measuring") as progress:
        poses = images.poses(images.index, progress=progress)
    tables = measure(run, images.config, images.index, images.labels, poses).errors.tables
    group = images.index.group
    return {**tables, "groups": np.arange(len(images.index)) if group is None else group}


def measure_maps(run: PoseRun, overrides: Sequence[str]) -> Arrays:
    """Equivariance errors |t f(I) - f(t(I))| of the 2D keypoints over grids (paper, supplement, section 6).

    f(I) comes from the canonical view, f(t(I)) from the same view after rotation or shift, made from the source. The
    two are compared in the source's frame, which is t^-1 applied to both; t keeps lengths. All images need boxes.

    Returns:
        "rotation_deg" (R,) and "shift_px" (T,), the places; "rotation_error_px" (R,) and "shift_error_px" (T, T), y
        before x: means over images and keypoints. Pixels are those of a view of 128. And, if the labels allow it,
        "constant_rotation_error_px" (R,), of the mean keypoints as a constant prediction: they stay where they are, so
        each errs by the chord that it should have moved along. The error of any constant under a shift is its length.
    """
    images = HeldOut(run, overrides)
    index = images.index
    still = images.poses(index)
    view_px_per_px = np.sqrt(np.abs(np.linalg.det(still.source_to_view_px[:, :, :2])))  # (N,)

    def error_px(x_px: float, y_px: float, rotation_deg: float) -> float:
        moved = images.poses(shifted(index, (x_px, y_px)), rotation_deg=rotation_deg)
        distance_px = np.linalg.norm(moved.keypoints_px - still.keypoints_px, axis=2).mean(axis=1) * view_px_per_px
        same = moved.samples == still.samples  # a bad file may have had two substitutes
        return float(distance_px[same].mean()) * SIDE_PX / images.config.geometry.side_px

    centre_px, side_px = np.split(index.box_px[:, None], [2], axis=2)
    radii_frac = np.linalg.norm((mean_keypoints_px(images.labels, index.box_px) - centre_px) / side_px, axis=2)
    chords_px = 2 * np.mean(radii_frac) * SIDE_PX * np.sin(np.radians(np.abs(ANGLES_DEG)) / 2)
    return {
        "rotation_deg": ANGLES_DEG,
        "rotation_error_px": np.array([error_px(0, 0, angle) for angle in ANGLES_DEG]),
        "shift_px": SHIFTS_PX,
        "shift_error_px": np.array([[error_px(x, y, 0) for x in SHIFTS_PX] for y in SHIFTS_PX]),
        **({"constant_rotation_error_px": chords_px} if np.isfinite(chords_px).all() else {}),
    }


def shifted(index: Index, shift_px: tuple[float, float]) -> Index:
    """The index with its boxes moved, so that what the views show is shifted by (x, y) pixels of a view of 128."""
    x, y = shift_px
    box_px = index.box_px.copy()
    side = index.box_px[:, 2] / SIDE_PX
    box_px[:, 0] -= np.where(index.mirrored, -x, x) * side
    box_px[:, 1] -= y * side
    return dataclasses.replace(index, box_px=box_px)


@cache
def measure_constants(*overrides: str) -> dict[str, dict[str, float]]:
    """Errors of constant predictions on the images that `overrides` choose, see train/evaluation/errors.py."""
    index = load_index(load_config(FinetuneConfig, (), overrides).data)
    return evaluation_constants(index, labels_to_learn(index))

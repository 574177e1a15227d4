"""How good a fine-tuned network is: its errors on labelled hands."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from errors import UserError
from models.hand import REFERENCE_BONE
from pipelines.config import each_source
from pipelines.samples.index import Index
from train.config import load_config, to_dict
from train.evaluation.metrics import (
    Interval,
    PoseErrors,
    confidence_intervals,
    in_one_place,
    paired_difference,
    pixel_errors,
    pose_errors,
    score_tables,
)
from train.finetune_config import FinetuneConfig
from train.pose.inference import Poses
from train.pose.run import PoseRun

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

FOCAL_BOXES = 5.0
"""Focal length over the side of the hand's box that stands for an unknown camera: about FreiHAND's."""


@dataclass(frozen=True)
class Truth:
    """What is known about N hands.

    Attributes:
        joints: (N, 21, 3) in the camera's frame, NaN where unknown; in metres, or, where no camera is known, in pixels
            up to scale and shift.
        in_metres: which of the two.
        scale_m: (N,) length of the reference bone, NaN where unknown.
        keypoints_px: (N, 21, 2) in the source's pixels, NaN where unknown.
        intrinsics: (N, 3, 3), a stand-in where unknown.
        has_camera: (N,) whether the intrinsics are known.
    """

    joints: Floats
    in_metres: bool
    scale_m: Floats
    keypoints_px: Floats
    intrinsics: npt.NDArray[np.float32]
    has_camera: npt.NDArray[np.bool_]

    @property
    def labelled(self) -> bool:
        """Whether anything at all is known."""
        return not (np.isnan(self.joints).all() and np.isnan(self.keypoints_px).all())

    def require_labels(self, index: Index) -> None:
        """Labels are needed.

        Raises:
            UserError: there are none.
        """
        if not self.labelled:
            raise UserError(
                f"{index.root} ({index.name}) has no poses to measure against: use a labelled source or part, or see "
                "what the network says with 'predict'"
            )

    def require_cameras(self, index: Index) -> None:
        """The camera and the scale of every hand are needed, to give poses in metres.

        Raises:
            UserError: some are not known.
        """
        if not (self.has_camera.all() and np.isfinite(self.scale_m).all()):
            raise UserError(
                f"{index.root} ({index.name}) lacks camera matrices or scales, and a submission is in metres: add "
                "evaluation_K.json and evaluation_scale.json"
            )


@dataclass(frozen=True)
class Evaluation:
    """A network's errors on the hands of an index.

    Attributes:
        run: the network and where it comes from.
        config: what it was measured on.
        index: the images.
        truth: their labels.
        poses: what the network said.
        joints: (N, 21, 3), what it said in the unit of the truth; NaN for hands that are left out.
        errors: distances in 3D, in the unit of the truth.
        errors_px: (N, 21), distances in 2D, in pixels of the source.
        left_out: how many hands are not measured, by reason.
    """

    run: PoseRun
    config: FinetuneConfig
    index: Index
    truth: Truth
    poses: Poses
    joints: Floats
    errors: PoseErrors
    errors_px: Floats
    left_out: dict[str, int]

    def tables(self) -> dict[str, Floats]:
        """Every metric before the means, (N, 21) each: those that this truth allows."""
        tables = score_tables(self.errors) if self.truth.in_metres else {"pa_epe_px": self.errors.pa_error_m}
        tables["epe_px"] = self.errors_px
        return {name: table for name, table in tables.items() if not np.isnan(table).all()}

    def groups(self) -> npt.NDArray[np.int64]:
        """(N,), hands that depend on each other share a number."""
        return np.arange(len(self.index)) if self.index.group is None else self.index.group


def evaluation_config(run: PoseRun, files: Sequence[Path], overrides: Sequence[str]) -> FinetuneConfig:
    """What to measure on: the images that the run held out, unless files and overrides say otherwise.

    Of a part or source that is not split it takes all, unless they name a split.

    Raises:
        UserError: as `load_config`, or the network itself would be another.
    """
    base = to_dict(run.config)
    tables = base["data"] if isinstance(base["data"], list) else [base["data"]]
    for table in tables:
        table["label_fraction"] = 1.0
        if table["split"] == "train":
            table["split"] = "val"
    config = load_config(FinetuneConfig, files, overrides, base=base)
    for table, source in zip(tables, each_source(config.data), strict=False):  # files may replace an array of sources
        if source.part == "evaluation" or source.source == "dexter_object":
            table["split"] = "all"
    config = load_config(FinetuneConfig, files, overrides, base=base)
    for name, now, was in (
        ("encoder.name", config.encoder.name, run.config.encoder.name),
        ("pose", config.pose, run.config.pose),
        ("geometry.side_px", config.geometry.side_px, run.config.geometry.side_px),
    ):
        if now != was:
            raise UserError(f"{name} belongs to the network of {run.path} and cannot be another: leave it out")
    return config


def truth_of(index: Index) -> Truth:
    """The labels of an index, NaN for what it lacks."""
    count = len(index)
    in_metres = "xyz_m" in index.targets
    joints = index.targets.get("xyz_m", index.targets.get("xyz_px"))
    if joints is None:
        joints = np.full((count, 21, 3), np.nan, np.float32)
    keypoints_px = index.keypoints_px
    if keypoints_px is None:
        keypoints_px = np.full((count, 21, 2), np.nan, np.float32)
    scale_m = index.targets.get("scale_m")
    if scale_m is None:
        scale_m = np.full(count, np.nan, np.float32)
        if in_metres:  # the dataset gives none, so it is measured
            scale_m = np.linalg.norm(joints[:, REFERENCE_BONE[0]] - joints[:, REFERENCE_BONE[1]], axis=1)
    intrinsics = index.targets.get("K", np.full((count, 3, 3), np.nan, np.float32))
    has_camera = np.asarray(np.isfinite(intrinsics).all(axis=(1, 2)))
    return Truth(
        joints.astype(np.float64),
        in_metres,
        np.where(scale_m > 0, scale_m, np.nan).astype(np.float64),
        keypoints_px.astype(np.float64),
        np.where(has_camera[:, None, None], intrinsics, _stand_in_cameras(index.box_px)),
        has_camera,
    )


def _stand_in_cameras(box_px: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Cameras that look at the middle of each box, `FOCAL_BOXES` of its sides away: (N, 3) -> (N, 3, 3)."""
    box = np.where(
        box_px[:, 2:] > 0, box_px, np.array([112, 112, 224], np.float32)
    )  # of a whole image, the size is not known
    cameras = np.zeros((len(box), 3, 3), np.float32)
    cameras[:, 0, 0] = cameras[:, 1, 1] = FOCAL_BOXES * box[:, 2]
    cameras[:, :2, 2], cameras[:, 2, 2] = box[:, :2], 1
    return cameras


def measure(
    run: PoseRun,
    config: FinetuneConfig,
    index: Index,
    truth: Truth,
    poses: Poses,
    *,
    proper_rotation: bool = False,
) -> Evaluation:
    """Errors of a network on labelled hands.

    A hand is left out, and counted, where its file cannot be read, nothing is known about it, its label is one point,
    or the network's answer is no number. Errors that no alignment removes are left out where camera or scale are not
    known.

    Args:
        run: the network.
        config: of the evaluation.
        index: the images.
        truth: their labels.
        poses: what the network says of them.
        proper_rotation: as `train.evaluation.metrics.pose_metrics`.

    Raises:
        UserError: no hand is left.
    """
    unit = np.where(np.isnan(truth.scale_m), 1.0, truth.scale_m)  # alignment does not care
    joints = poses.joints * unit[:, None, None]
    keypoints_px = _with_wrist(run, poses, truth.intrinsics)

    unreadable = poses.samples != np.arange(len(index))
    known = [np.asarray(np.isfinite(points).all(axis=2)) for points in (truth.joints, truth.keypoints_px)]  # (N, 21)
    unlabelled = ~(known[0] | known[1]).any(axis=1)
    one_point = in_one_place(truth.joints, known[0])
    no_numbers = ~np.isfinite(joints).all(axis=(1, 2)) | ~np.isfinite(keypoints_px).all(axis=(1, 2))
    usable = ~(unreadable | unlabelled | one_point | no_numbers)
    left_out = {
        "unreadable": int(unreadable.sum()),
        "without labels": int((unlabelled & ~unreadable).sum()),
        "label is one point": int((one_point & ~unreadable).sum()),
        "prediction is no number": int((no_numbers & ~unreadable & ~unlabelled & ~one_point).sum()),
    }
    if not usable.any():
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        raise UserError(
            f"{index.root} ({index.name}): no hand is left to measure ({reasons}): see to images and labels"
        )
    joints[~usable] = np.nan

    valid, seen = (which & usable[:, None] for which in known)
    if valid.any():
        errors = pose_errors(joints, truth.joints, valid=valid, proper_rotation=proper_rotation)
        absolute = truth.has_camera & ~np.isnan(truth.scale_m) & truth.in_metres
        errors = dataclasses.replace(errors, error_m=np.where(absolute[:, None], errors.error_m, np.nan))
    else:  # 2D labels only
        errors = PoseErrors.unknown(*valid.shape)
    errors_px = (
        pixel_errors(keypoints_px, truth.keypoints_px, valid=seen) if seen.any() else np.full(seen.shape, np.nan)
    )
    return Evaluation(run, config, index, truth, poses, joints, errors, errors_px, left_out)


def _with_wrist(run: PoseRun, poses: Poses, intrinsics: npt.NDArray[np.float32]) -> Floats:
    """2D keypoints (N, 21, 2) with the wrist, projected from 3D where the network's own keypoint 0 is the palm."""
    if run.config.pose.first_keypoint == "wrist":
        return poses.keypoints_px
    keypoints_px = poses.keypoints_px.copy()
    wrist = np.einsum("nij,nj->ni", intrinsics.astype(np.float64), poses.joints[:, 0])
    keypoints_px[:, 0] = wrist[:, :2] / wrist[:, 2:]
    return keypoints_px


def intervals(evaluation: Evaluation, *, resamples: int = 1000) -> dict[str, Interval]:
    """The metrics with their bootstrap intervals over hands."""
    return confidence_intervals(evaluation.tables(), groups=evaluation.groups(), resamples=resamples)


def difference(one: Evaluation, other: Evaluation, *, resamples: int = 1000) -> dict[str, Interval]:
    """Metrics of one network minus those of the other on the hands that both were measured on, with intervals."""
    ours, theirs = one.tables(), other.tables()
    return paired_difference(
        {name: ours[name] for name in ours if name in theirs},
        {name: theirs[name] for name in ours if name in theirs},
        groups=one.groups(),
        resamples=resamples,
    )


def for_other_run(config: FinetuneConfig, run: PoseRun) -> FinetuneConfig:
    """The same images for another network: views of its own side, boxes with the margin that it was trained with."""
    margin = each_source(run.config.data)[0].box_margin
    sources = tuple(dataclasses.replace(source, box_margin=margin) for source in each_source(config.data))
    return dataclasses.replace(
        config,
        data=sources if isinstance(config.data, tuple) else sources[0],
        geometry=run.config.geometry,
        pose=run.config.pose,
        encoder=run.config.encoder,
    )


def trained_on(run: PoseRun, config: FinetuneConfig) -> bool:
    """Whether an evaluation uses images of the run's own training, as far as the configurations tell."""
    keys = ("source", "root", "part")
    for source in each_source(config.data):
        for trained in each_source(run.config.data):
            same = all(getattr(source, key) == getattr(trained, key) for key in keys)
            apart = {source.split, trained.split} == {"train", "val"}
            if same and not apart and run.step > 0:
                return True
    return False


def worst_hands(evaluation: Evaluation, count: int) -> npt.NDArray[np.int64]:
    """Rows of the hands with the largest errors after alignment, the worst first."""
    table = evaluation.errors.pa_error_m if "pa_epe_cm" in evaluation.tables() else evaluation.errors_px
    known = ~np.isnan(table)
    means = np.where(known, table, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    rows = np.flatnonzero(known.any(axis=1))
    return rows[np.argsort(-means[rows], kind="stable")][:count]


def device_of(config: FinetuneConfig) -> torch.device:
    """Where to compute, by `train.device`.

    Raises:
        UserError: a GPU is asked for and there is none.
    """
    wanted = config.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device = "cuda": there is no CUDA device here; use "auto" or "cpu"')
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")

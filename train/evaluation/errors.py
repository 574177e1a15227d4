"""Errors of one or several networks on the images of an evaluation, and those of constant predictions beside them.

The constants are fitted to the labels that are measured, which favours them. A network that is not clearly better has
learnt nothing from the pictures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np
from scipy.sparse.csgraph import connected_components

from peclr_dali.errors import UserError
from peclr_dali.parsing import or_shipped
from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import has_parts
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config, to_dict
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import Errors, PoseLabels, errors_of
from peclr_dali.train.pose.metrics import (
    METRICS,
    Interval,
    align,
    confidence_intervals,
    in_one_place,
    interval_over_runs,
    mean_over_samples,
    metric_of,
    pixel_errors,
    pose_tables,
    relative_pixel_errors,
)
from peclr_dali.train.pose.pose_run import PoseRun
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS


@dataclass(frozen=True)
class Evaluation:
    """Errors of a network, or means over several, on the samples of an index, with the configuration of that index.

    Attributes:
        run: the network, or the first one.
        proper_rotation: whether poses were aligned by rotations only.
        several: the evaluations of the networks whose means these are.
    """

    run: PoseRun
    config: FinetuneConfig
    index: Index
    labels: PoseLabels
    errors: Errors
    proper_rotation: bool = False
    several: "Sequence[Evaluation]" = ()

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """The metrics with their intervals over the groups of the index, cut to what a metric can be."""
        return {
            name: Interval(value, max(low, 0.0), min(high, np.inf if METRICS[name].unit else 1.0))
            for name, (value, low, high) in confidence_intervals(self.errors.tables, groups=self.index.group).items()
        }

    def minus(self, other: "Evaluation") -> dict[str, Interval]:
        """Difference of the metrics on the samples measured for both, with intervals; of several networks in pairs."""
        ours, theirs = self.errors.tables, other.errors.tables
        differences = {name: ours[name] - theirs[name] for name in ours if name in theirs}
        if len(self.several) < 2:
            return confidence_intervals(differences, groups=self.index.group)
        pairs = list(zip(self.several, other.several, strict=True))
        return {
            name: interval_over_runs(
                [one.errors.tables[name] - another.errors.tables[name] for one, another in pairs],
                trials_of((one.run.config, another.run.config) for one, another in pairs),
                self.index.groups,
            )
            for name in differences
        }

    def worst(self, count: int) -> IntArray:
        """Rows of the samples with the largest errors after alignment, the worst first."""
        tables = self.errors.tables
        means = mean_over_samples(tables["pa_epe_cm" if "pa_epe_cm" in tables else "epe_px"].T)
        return np.argsort(-means, kind="stable")[: min(count, int(np.isfinite(means).sum()))]


def mean_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The means over networks that were measured on the same images, of the metrics that all have."""
    first, of_all = evaluations[0], [one.errors.tables for one in evaluations]
    means = {
        name: np.mean([tables[name] for tables in of_all], axis=0)
        for name in first.errors.tables
        if all(name in tables for tables in of_all)
    }
    return replace(first, errors=replace(first.errors, tables=means), several=evaluations)


def require_pairs(ours: Sequence[PoseRun], theirs: Sequence[PoseRun]) -> None:
    """Require that each seed has one run on both sides, if there are two. Two runs alone may have any seeds.

    Raises:
        UserError: a seed has no run on one side, or several.
    """
    seeds, others = ([run.config.run.seed for run in side] for side in (ours, theirs))
    unpaired = [seed for seed in sorted({*seeds, *others}) if not seeds.count(seed) == others.count(seed) == 1]
    if unpaired and theirs and len(seeds) + len(others) > 2:
        raise UserError(
            f"runs are compared in pairs of one run.seed: RUN has the seeds {seeds}, --compare {others}, and seed "
            f"{unpaired[0]} is no pair. Fine-tune the run that is missing, or leave that seed out"
        )


def trials_of(pairs: Iterable[Sequence[FinetuneConfig]]) -> list[int]:
    """The number of each pair's trial: pairs belong to one if a run of both starts from the same weights.

    Each pair whose runs start from random weights, or ImageNet's, is a trial of its own.
    """
    starts = [{_start_of(config) for config in pair} - {None} for pair in pairs]
    common = np.array([[len(one & another) for one in starts] for another in starts])
    return [int(number) for number in connected_components(common)[1]]


def _start_of(config: FinetuneConfig) -> Path | None:
    """The file of weights, or the run's folder, from which a run starts; None: random weights or ImageNet's."""
    if config.encoder.weights in ("random", "imagenet"):
        return None
    path = or_shipped(Path(config.encoder.weights), ".safetensors").resolve()
    return path.parent.parent if path.parent.name in (CHECKPOINTS, BEST) else path


def evaluation_config(run: PoseRun, files: Sequence[Path], overrides: Sequence[str]) -> FinetuneConfig:
    """Configuration of the images to measure on: those that the run held out, unless files and overrides change it.

    Parts and sources that are not split are used whole.

    Raises:
        UserError: as in `load_config`, or a key of the network is changed.
    """
    tables = to_dict(run.config)
    for source in tables["data"]:
        source |= {"label_fraction": 1.0, "split": "val" if source["split"] == "train" else source["split"]}
    config = load_config(FinetuneConfig, files, overrides, base=tables)
    for name in ("encoder.name", "pose", "geometry.side_px"):
        value_of = attrgetter(name)
        if value_of(config) != value_of(run.config):
            raise UserError(f"{name} belongs to the network of {run.path} and cannot be changed: leave it out")
    data = [
        replace(source, split="all") if source.part == "evaluation" or source.source == "dexter_object" else source
        for source in config.data
    ]
    return replace(config, data=tuple(data))


def measure(
    run: PoseRun,
    config: FinetuneConfig,
    index: Index,
    labels: PoseLabels,
    poses: Poses,
    *,
    proper_rotation: bool = False,
) -> Evaluation:
    """Compute the errors of a network on the samples of an index. Arguments as in `Evaluation` and `errors_of`.

    Raises:
        UserError: no sample can be measured.
    """
    errors = errors_of(
        poses, labels, unreadable=poses.samples != np.arange(len(index)), proper_rotation=proper_rotation
    )
    if errors.measured == 0:
        raise UserError(
            f"{index.root} ({index.name}): no sample can be measured ({errors.reasons}): check images and labels"
        )
    if "epe_px" in errors.tables:
        view_px_per_px = np.sqrt(np.abs(np.linalg.det(poses.source_to_view_px[:, :, :2])))
        true_px, side_px = labels.keypoints_px.astype(np.float64), config.geometry.side_px
        errors.tables.update(relative_pixel_errors(errors.tables["epe_px"], true_px, view_px_per_px, side_px))
    return Evaluation(run, config, index, labels, errors, proper_rotation)


def for_other_run(config: FinetuneConfig, run: PoseRun) -> FinetuneConfig:
    """The configuration for another network: the same images, with that network's view side and box margins.

    A source that the network was trained on has its own margin there; others have that of the first.
    """
    margins = {_place(source)[:2]: source.box_margin for source in run.config.data}
    sources = tuple(
        replace(source, box_margin=margins.get(_place(source)[:2], run.box_margin)) for source in config.data
    )
    return replace(config, data=sources, geometry=run.config.geometry, pose=run.config.pose, encoder=run.config.encoder)


def _place(data: DataConfig) -> tuple[str, Path, str | None]:
    """Where a source's labels are, however its path is spelt."""
    return data.source, Path(data.root).resolve(), data.annotations


def trained_on(run: PoseRun, config: FinetuneConfig) -> bool:
    """Whether the configurations say that an evaluation uses training images of the run."""
    return run.step > 0 and any(
        _place(source) == _place(trained)
        and (source.part == trained.part or not has_parts(source.source))
        and {source.split, trained.split} != {"train", "val"}
        for source in config.data
        for trained in run.config.data
    )


def evaluation_constants(index: Index, labels: PoseLabels) -> dict[str, dict[str, float]]:
    """The metrics of each of `CONSTANTS` that the labels allow, by name."""
    constants = {}
    placed_px = mean_keypoints_px(index, labels)
    known_px = np.asarray(np.isfinite(labels.keypoints_px + placed_px).all(axis=2))
    if known_px.any():
        constants["mean_keypoints"] = {
            "epe_px": metric_of(pixel_errors(placed_px, labels.keypoints_px, valid=known_px))
        }
    if labels.in_metres:
        constants |= constant_pose_errors(labels.joints.astype(np.float64))
    return constants


def mean_keypoints_px(index: Index, labels: PoseLabels) -> DoubleArray:
    """The mean place of each keypoint in its box, put into every box: (N, K, 2), in pixels of the source.

    NaN where a keypoint is never labelled, or the box is a whole image of unknown size. Mirrored samples count as their
    mirror image.
    """
    box_px = index.box_px
    side_px = np.where(box_px[:, 2] > 0, box_px[:, 2], np.nan)[:, None, None]
    turned = np.where(index.mirrored[:, None], [-1.0, 1.0], 1.0)[:, None]  # (N, 1, 2)
    in_box = ((labels.keypoints_px - box_px[:, None, :2]) / side_px * turned).astype(np.float64)
    return np.asarray(np.ma.masked_invalid(in_box).mean(axis=0).filled(np.nan) * turned * side_px + box_px[:, None, :2])


def constant_pose_errors(poses_m: DoubleArray) -> dict[str, dict[str, float]]:
    """EPE and AUC of the mean of the joints in the camera's frame; PA-EPE and PA-AUC of one rigid pose.

    The rigid pose is the mean of the poses after alignment to each other; the metric aligns it to each pose.

    Args:
        poses_m: (N, K, 3) in metres. Labels that are a single point, or not finite, are left out; of none, the result
            is empty.
    """
    known: BoolArray = np.asarray(np.isfinite(poses_m).all(axis=2))
    poses_m = poses_m[known.all(axis=1) & ~in_one_place(poses_m, known)]
    if not len(poses_m):
        return {}
    rigid_m = poses_m[0]
    for _ in range(5):  # two are enough to converge
        rigid_m = align(poses_m, np.broadcast_to(rigid_m, poses_m.shape)).mean(axis=0)
    errors = {}
    for name, pose_m, metrics in (
        ("mean_joints", poses_m.mean(axis=0), ("epe_cm", "auc")),
        ("rigid_pose", rigid_m, ("pa_epe_cm", "pa_auc")),
    ):
        tables = pose_tables(np.broadcast_to(pose_m, poses_m.shape), poses_m)
        errors[name] = {metric: metric_of(tables[metric]) for metric in metrics}
    return errors

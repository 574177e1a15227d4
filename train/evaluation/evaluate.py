"""The `evaluate` command: estimates poses, measures errors, writes tables and pictures."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from peclr_dali.errors import UserError
from peclr_dali.parsing import require_results_of
from peclr_dali.pipelines.config import WITH_PARTS
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.tables import to_dict
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation import report
from peclr_dali.train.evaluation.constants import evaluation_constants
from peclr_dali.train.evaluation.two_pass_crop import estimate_in_two_passes, save_submission
from peclr_dali.train.pose.inference import Poses, Progress, estimate_poses
from peclr_dali.train.pose.labels import Errors, PoseLabels, errors_of
from peclr_dali.train.pose.metrics import (
    Interval,
    confidence_intervals,
    mean_over_samples,
    paired_difference,
    relative_pixel_errors,
)
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS
from peclr_dali.writing import write_text


@dataclass(frozen=True)
class Evaluation:
    """A network's errors on the samples of an index, with the configuration of that index."""

    run: PoseRun
    config: FinetuneConfig
    index: Index
    labels: PoseLabels
    errors: Errors

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """The metrics with their bootstrap intervals over samples."""
        return confidence_intervals(self.errors.tables, groups=self.index.group)

    def minus(self, other: Evaluation) -> dict[str, Interval]:
        """Difference of the metrics on the samples measured for both, with intervals."""
        ours, theirs = self.errors.tables, other.errors.tables
        ours, theirs = ({name: one[name] for name in ours if name in theirs} for one in (ours, theirs))
        return paired_difference(ours, theirs, groups=self.index.group)

    def worst(self, count: int) -> npt.NDArray[np.int64]:
        """Rows of the samples with the largest errors after alignment, the worst first."""
        tables = self.errors.tables
        means = mean_over_samples(tables["pa_epe_cm" if "pa_epe_cm" in tables else "epe_px"].T)
        return np.argsort(-means, kind="stable")[: min(count, int(np.isfinite(means).sum()))]


def evaluation_config(run: PoseRun, files: Sequence[Path], overrides: Sequence[str]) -> FinetuneConfig:
    """Configuration of the images to measure on: those that the run held out, unless files and overrides change it.

    If a part or source is not split, all its images are used, unless a split is set.

    Raises:
        UserError: as in `load_config`, or a key of the network is changed.
    """
    config = load_config(FinetuneConfig, files, overrides, base=_of_held_out(run.config))
    whole = [one.part == "evaluation" or one.source == "dexter_object" for one in config.data]
    config = load_config(FinetuneConfig, files, overrides, base=_of_held_out(run.config, whole))
    for name in ("encoder.name", "pose", "geometry.side_px"):
        now, was = (attrgetter(name)(each) for each in (config, run.config))
        if now != was:
            raise UserError(f"{name} belongs to the network of {run.path} and cannot be changed: leave it out")
    return config


def _of_held_out(config: FinetuneConfig, whole: Sequence[bool] = ()) -> dict[str, Any]:
    """A run's configuration as tables, on the images that it held out, with all their labels.

    `whole`: for each source, whether it is not split. Files may replace the sources, so there may be more or fewer.
    """
    tables = to_dict(config)
    for number, source in enumerate(tables["data"]):
        source["label_fraction"] = 1.0
        if number < len(whole) and whole[number]:
            source["split"] = "all"
        elif source["split"] == "train":
            source["split"] = "val"
    return tables


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
    unreadable = poses.samples != np.arange(len(index))
    errors = errors_of(poses, labels, unreadable=unreadable, proper_rotation=proper_rotation)
    if errors.measured == 0:
        raise UserError(
            f"{index.root} ({index.name}): no sample can be measured ({errors.reasons}): check images and labels"
        )
    if "epe_px" in errors.tables:
        view_px_per_px = np.sqrt(np.abs(np.linalg.det(poses.source_to_view_px[:, :, :2])))
        true_px, side_px = labels.keypoints_px.astype(np.float64), config.geometry.side_px
        errors.tables.update(relative_pixel_errors(errors.tables["epe_px"], true_px, view_px_per_px, side_px))
    return Evaluation(run, config, index, labels, errors)


def for_other_run(config: FinetuneConfig, run: PoseRun) -> FinetuneConfig:
    """The configuration for another network: the same images, with that network's view side and box margins.

    A source that the network was trained on has its own margin there; others have that of the first.
    """
    margins = {(one.source, one.root): one.box_margin for one in run.config.data}
    sources = tuple(
        dataclasses.replace(one, box_margin=margins.get((one.source, one.root), run.box_margin)) for one in config.data
    )
    return dataclasses.replace(
        config,
        data=sources,
        geometry=run.config.geometry,
        pose=run.config.pose,
        encoder=run.config.encoder,
    )


def trained_on(run: PoseRun, config: FinetuneConfig) -> bool:
    """Whether the configurations say that an evaluation uses training images of the run."""
    same = attrgetter("source", "root", "annotations")
    return run.step > 0 and any(
        same(source) == same(trained)
        and (source.part == trained.part or source.source not in WITH_PARTS)
        and {source.split, trained.split} != {"train", "val"}
        for source in config.data
        for trained in run.config.data
    )


log = logging.getLogger(__name__)

RESULTS = ("metrics.json", "poses.csv", "pck.png", "worst.png")
"""The files that `evaluate` writes."""
Crop = Literal["boxes", "two-pass"]
_ESTIMATES = {"boxes": estimate_poses, "two-pass": estimate_in_two_passes}


class Evaluated(NamedTuple):
    """Result: tables for the terminal, and the written files."""

    tables: list[Table]
    files: list[Path]


def evaluate(
    source: Path,
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    out: Path | None,
    compare: Path | None,
    crop: Crop,
    worst: int,
    submission: bool,
    proper_rotation: bool,
    progress: Progress | None = None,
) -> Evaluated:
    """Measure a fine-tuned network, and write results and pictures.

    Args:
        source: a fine-tuning run, or one of its checkpoints.
        files: TOML files that change the run's configuration, as do `overrides`, key=value.
        out: folder for the results; by default "evaluation" in the run's folder.
        compare: another run to measure on the same images.
        crop: crop by the data's boxes, or without boxes in the authors' two passes.

    Raises:
        UserError: a run, the data or the folder cannot be used.
    """
    runs = [load_pose_run(path) for path in (source, compare) if path is not None]  # before the work, in case one fails
    run = runs[0]
    config = evaluation_config(run, files, overrides)
    world = single_process(config.train.device)
    index = load_index(config.data)
    labels = PoseLabels.of(index)
    _require_measurable(index, labels, submission=submission)
    folder = _folder(out, source)
    estimate = partial(_ESTIMATES[crop], world=world)
    poses = estimate(run.network, index, labels.intrinsics, config, progress=progress)
    written = list(save_submission(folder, poses, labels)) if submission else []
    if not labels.labelled:
        log.warning("the images have no labels, so nothing is measured")
        return Evaluated([], written)

    for one in runs:
        if trained_on(one, config):
            log.warning("%s was trained on some or all of these images", one.path)
    results = partial(
        report.results, constants=evaluation_constants(index, labels), proper_rotation=proper_rotation, crop=crop
    )
    evaluation = measure(run, config, index, labels, poses, proper_rotation=proper_rotation)
    rows = evaluation.worst(worst)
    content = {**results(evaluation), "worst": report.of_poses(evaluation, rows.tolist())}
    tables = [report.table_of(_title(evaluation), evaluation.intervals, constants=content["constants"])]
    shown = {_name(run): content}
    for other in runs[1:]:
        same_images = for_other_run(config, other)
        other_index = load_index(same_images.data)
        poses = estimate(other.network, other_index, labels.intrinsics, same_images, progress=progress)
        compared = measure(other, same_images, other_index, labels, poses, proper_rotation=proper_rotation)
        difference, theirs = evaluation.minus(compared), results(compared)
        content["comparison"] = {
            "minus": str(other.path), "difference": report.intervals_for_json(difference), "other": theirs
        }  # fmt: skip
        tables.append(report.table_of(f"minus {other.path}, on the same images", difference, signed=True))
        name = _name(other)
        shown[name if name not in shown else f"{name}, the other"] = theirs

    # In the order of their errors: not as joined sources, whose rows ascend.
    few = dataclasses.replace(index, sources=()).select(rows)
    closer = estimate(run.network, few, labels.intrinsics[rows], config, keep_images=len(rows))
    metrics, table, curves, pictures = results_files = [folder / name for name in RESULTS]
    write_text(metrics, json.dumps(content, indent=2) + "\n")
    report.save_poses(table, evaluation)
    report.save_pck(curves, shown)
    report.save_worst(pictures, evaluation, rows, closer)
    return Evaluated(tables, written + results_files)


def _require_measurable(index: Index, labels: PoseLabels, *, submission: bool) -> None:
    """Check that the images have what is measured, or what a submission needs."""
    if not submission and not labels.labelled:
        raise UserError(
            f"{index.root} ({index.name}) has no poses to measure against: use a labelled source or part, or draw "
            "its poses with 'predict'"
        )
    if submission and not (labels.has_camera.all() and np.isfinite(labels.scale_m).all()):
        raise UserError(
            f"{index.root} ({index.name}) lacks camera matrices or scales, and a submission is in metres: add "
            "evaluation_K.json and evaluation_scale.json"
        )


def _title(evaluation: Evaluation) -> str:
    """The checkpoint, the number of poses that were measured, and why others were not."""
    errors = evaluation.errors
    left_out = f", left out: {errors.reasons}" if errors.reasons else ""
    return f"{evaluation.run.path}, {errors.measured} hands{left_out}"


def _folder(out: Path | None, source: Path) -> Path:
    folder = out or (source if source.is_dir() else source.parent) / "evaluation"
    require_results_of("evaluate", folder, RESULTS, lambda found: found["checkpoint"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): name another folder with --out") from error
    return folder


def _name(run: PoseRun) -> str:
    """Name of a run: of its folder, or of a checkpoint outside a run's folder."""
    return run.path.parent.parent.name if run.path.parent.name in (BEST, CHECKPOINTS) else run.path.stem

"""The `evaluate` command: estimates poses, measures errors, writes tables and pictures."""

import dataclasses
import json
import logging
import re
import tempfile
import zipfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, box_file, refuse_among_images
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.boxes import column_of
from peclr_dali.pipelines.sources.label_files.dataset_file import plain_name
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation import report
from peclr_dali.train.evaluation.errors import (
    evaluation_config,
    evaluation_constants,
    for_other_run,
    mean_of,
    measure,
    require_pairs,
    trained_on,
)
from peclr_dali.train.pose.inference import Poses, Progress, estimate_in_two_passes, estimate_poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.metrics import why_no_interval
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS
from peclr_dali.writing import require_own_results, whole_file, write_text

log = logging.getLogger(__name__)

RESULTS = ("metrics.json", "poses.csv", "pck.png", "worst.png")
"""The files that `evaluate` writes."""
SUBMISSION = ("pred.json", "pred.zip")
"""The files for FreiHAND's leaderboard."""
Crop = Literal["boxes", "two-pass"]


def evaluate(
    sources: Sequence[Path],
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    out: Path | None,
    compare: Sequence[Path],
    crop: Crop,
    worst: int,
    submission: bool,
    proper_rotation: bool,
    groups: str | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> tuple[list[Table], list[Path]]:
    """Measure fine-tuned networks, and write results and pictures; returns tables for the terminal, and the files.

    Args:
        sources: fine-tuning runs, or their checkpoints. Of several, errors are means, and `worst.png` shows the network
            with the smallest seed.
        files: TOML files that change the run's configuration, as do `overrides`, key=value.
        out: folder for the results; by default "evaluation" in the first run's folder.
        compare: other runs to measure on the same images, as many as `sources` and with the same seeds.
        crop: crop by the data's boxes, or without boxes in the authors' two passes.
        groups: groups for the intervals, see `grouped`; by default those of the data, such as FreiHAND's poses.
        force: write into `out` even if files there are not of this command, and replace them.

    Raises:
        UserError: a run, the data or the folder cannot be used.
    """
    runs, others = (  # before the work, in case one fails
        sorted(map(load_pose_run, paths), key=attrgetter("config.run.seed")) for paths in (sources, compare)
    )
    require_pairs(runs, others)
    run = runs[0]
    config = evaluation_config(run, files, overrides)
    folder = out or (sources[0] if sources[0].is_dir() else sources[0].parent) / "evaluation"
    refuse_among_images(folder, config.data)
    require_own_results(folder, [*RESULTS, *(SUBMISSION if submission else [])], force=force)
    if submission:  # of every image, whatever the run left out
        data = [
            dataclasses.replace(source, part="evaluation", split="all", label_fraction=1.0, bad_list=None)
            for source in config.data
        ]
        config = dataclasses.replace(config, data=tuple(data))
    index = load_index(config.data)
    index = index if groups is None else grouped(index, groups, config.data)
    labels = PoseLabels.of(index)
    if not submission and not labels.labelled:
        raise UserError(
            f"{index.root} ({index.name}) has no poses to measure against: use a labelled source or part ('coco' for "
            "keypoints in JSON), or draw its poses with 'predict'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # a folder that cannot be written to fails before the work
    poses = _estimate(run, config, index, labels, crop, progress=progress)
    written = save_submission(folder, poses, labels) if submission else []
    if not labels.labelled:
        log.warning("the images have no labels, so nothing is measured")
        return [], written

    if reason := why_no_interval(index.groups):
        log.warning("no intervals: %s", reason)
    for measured in (*runs, *others):
        if trained_on(measured, config):
            log.warning("%s was trained on some or all of these images", measured.path)
    evaluations = [measure(run, config, index, labels, poses, proper_rotation=proper_rotation)]
    for other in (*runs[1:], *others):
        its_config = for_other_run(config, other)
        its_index = dataclasses.replace(load_index(its_config.data), group=index.group)
        its_poses = _estimate(other, its_config, its_index, labels, crop, progress=progress)
        evaluations.append(measure(other, its_config, its_index, labels, its_poses, proper_rotation=proper_rotation))
    constants = evaluation_constants(index, labels)
    evaluation = mean_of(evaluations[: len(runs)])
    rows = evaluation.worst(worst)
    content = {
        **report.results(evaluation, constants, crop),
        "groups": groups or "of the data",
        "worst": report.of_poses(evaluation, rows.tolist()),
    }
    left_out = f", left out: {evaluation.errors.reasons}" if evaluation.errors.reasons else ""
    title = f"{' and '.join(content['checkpoints'])}, {evaluation.errors.measured} hands{left_out}"
    tables = [report.table_of(title, evaluation.intervals, constants=constants)]
    curves_of = {_names(runs): content}
    if others:
        compared = mean_of(evaluations[len(runs) :])
        difference, other_results = evaluation.minus(compared), report.results(compared, constants, crop)
        content["comparison"] = {
            "minus": str(others[0].path), "difference": report.intervals_for_json(difference),
            **report.lost_and_notes(content, other_results), "other": other_results,
        }  # fmt: skip
        tables.append(
            report.table_of(
                f"minus {' and '.join(other_results['checkpoints'])}, on the same images",
                difference,
                signed=True,
                remarks=content["comparison"]["notes"],
            )
        )
        curves_of[f"compared with {_names(others)}"] = other_results

    # In the order of their errors: not as joined sources, whose rows ascend.
    worst_images = dataclasses.replace(index, sources=()).select(rows)
    worst_poses = _estimate(run, config, worst_images, labels[rows], crop, keep_images=len(rows))
    metrics, table, curves, pictures = (folder / name for name in RESULTS)
    write_text(metrics, json.dumps(content, indent=2) + "\n")
    report.save_poses(table, evaluation)
    report.save_pck(curves, curves_of)
    report.save_worst(pictures, evaluation, rows, worst_poses)
    return tables, [*written, metrics, table, curves, pictures]


def _estimate(
    run: PoseRun,
    config: FinetuneConfig,
    index: Index,
    labels: PoseLabels,
    crop: Crop,
    *,
    keep_images: int = 0,
    progress: Progress = lambda done, total: None,
) -> Poses:
    """The poses of all images of an index, by the boxes of the index or without them."""
    world = single_process(config.train.device)
    estimate = estimate_in_two_passes if crop == "two-pass" else estimate_poses
    return estimate(run.network, index, labels.intrinsics, config, world, keep_images=keep_images, progress=progress)


def grouped(index: Index, groups: str, data: Sequence[DataConfig] = ()) -> Index:
    """The index with other groups: stretches of N images in their order, or images with the same text.

    Args:
        groups: the number N; or a column of the boxes file, which has that text; or a regular expression, whose
            parentheses, or else the whole of it, hold that text in an image's name.
        data: the index's source, for the boxes file; of several sources none is read.

    Raises:
        UserError: it is neither, or the column or the expression has no text for an image.
    """
    file = box_file(data[0]) if len(data) == 1 else None
    column = None if file is None else column_of(file, groups)
    try:
        if groups.isdecimal():
            keys = [str(row // int(groups)) for row in range(len(index))]
        elif column is not None:
            keys = [column.get(plain_name(name), "") for name in index.paths]
        else:
            matches = [re.search(groups, name) for name in index.paths]
            keys = ["" if match is None else str(match.groups() or [match[0]]) for match in matches]
        if "" in keys or not groups:
            raise ValueError(f"no such column, or no such text for {index.paths[keys.index('') if groups else 0]}")
    except (re.error, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"--groups {groups!r}: {error}; expected a number of images from 1 on, a column of the boxes file or a "
            "regular expression"
        ) from error
    return dataclasses.replace(index, group=np.unique(keys, return_inverse=True)[1])


def _names(runs: Sequence[PoseRun]) -> str:
    """Names of runs: of their folders, or of checkpoints outside a run's folder."""
    return ", ".join(
        run.path.parent.parent.name if run.path.parent.name in (BEST, CHECKPOINTS) else run.path.stem for run in runs
    )


def save_submission(folder: Path, poses: Poses, labels: PoseLabels) -> list[Path]:
    """Write pred.json for FreiHAND's evaluation, with joints in metres, and pred.zip for the leaderboard.

    A missing hand, camera or scale is a `UserError`, since the leaderboard needs every image.
    """
    joints_m = poses.joints * labels.scale_m[:, None, None].astype(np.float64)
    is_its_own = poses.samples == np.arange(len(joints_m))  # not a substitute's
    missing = np.flatnonzero(~(np.isfinite(joints_m).all(axis=(1, 2)) & labels.has_camera & is_its_own))
    if len(missing):
        raise UserError(
            f"no hand for {len(missing)} of {len(joints_m)} images, the first is image {missing[0]}: its file, its "
            "camera matrix or its scale is missing. The leaderboard needs every image"
        )
    content = [joints_m.tolist(), [[[0.0, 0.0, 0.0]] * 778] * len(joints_m)]  # MANO's vertices, for the mesh's metrics
    as_json, as_zip = (folder / name for name in SUBMISSION)
    write_text(as_json, json.dumps(content))
    with whole_file(as_zip) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(as_json, "pred.json")
    return [as_json, as_zip]

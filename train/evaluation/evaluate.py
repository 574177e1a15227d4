"""The `evaluate` command: estimates poses, measures errors, writes tables and pictures."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rich.table import Table

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, box_file, refuse_among_images
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.boxes import column_of
from peclr_dali.pipelines.sources.label_files.csv_table import plain_name
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation import report
from peclr_dali.train.evaluation.errors import (
    Evaluation,
    evaluation_config,
    evaluation_constants,
    for_other_run,
    measure,
    trained_on,
)
from peclr_dali.train.evaluation.two_pass_crop import SUBMISSION, estimate_in_two_passes, save_submission
from peclr_dali.train.pose.inference import Progress, estimate_poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.metrics import LEAST_GROUPS
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS
from peclr_dali.writing import require_own_results, write_text

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
    groups: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Evaluated:
    """Measure a fine-tuned network, and write results and pictures.

    Args:
        source: a fine-tuning run, or one of its checkpoints.
        files: TOML files that change the run's configuration, as do `overrides`, key=value.
        out: folder for the results; by default "evaluation" in the run's folder.
        compare: another run to measure on the same images.
        crop: crop by the data's boxes, or without boxes in the authors' two passes.
        groups: groups for the intervals, see `grouped`; by default those of the data, such as FreiHAND's poses.
        force: write into `out` even if files there are not of this command, and replace them.

    Raises:
        UserError: a run, the data or the folder cannot be used.
    """
    runs = [load_pose_run(path) for path in (source, compare) if path is not None]  # before the work, in case one fails
    run = runs[0]
    config = evaluation_config(run, files, overrides)
    folder = out or (source if source.is_dir() else source.parent) / "evaluation"
    refuse_among_images(folder, config.data)
    require_own_results(folder, [*RESULTS, *(SUBMISSION if submission else [])], force=force)
    if submission:  # of every image, whatever the run left out
        every = partial(dataclasses.replace, part="evaluation", split="all", label_fraction=1.0, bad_list=None)
        config = dataclasses.replace(config, data=tuple(map(every, config.data)))
    world = single_process(config.train.device)
    index = load_index(config.data)
    index = index if groups is None else grouped(index, groups, config.data)
    labels = PoseLabels.of(index)
    if not submission and not labels.labelled:
        raise UserError(
            f"{index.root} ({index.name}) has no poses to measure against: use a labelled source or part, or draw "
            "its poses with 'predict'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    estimate = partial(_ESTIMATES[crop], world=world)
    poses = estimate(run.network, index, labels.intrinsics, config, progress=progress)
    written = list(save_submission(folder, poses, labels)) if submission else []
    if not labels.labelled:
        log.warning("the images have no labels, so nothing is measured")
        return Evaluated([], written)

    if (count := len(np.unique(index.groups))) < LEAST_GROUPS:
        log.warning("no intervals: the images are %d groups, expected at least %d", count, LEAST_GROUPS)
    for one in runs:
        if trained_on(one, config):
            log.warning("%s was trained on some or all of these images", one.path)
    results = partial(
        report.results, constants=evaluation_constants(index, labels), proper_rotation=proper_rotation, crop=crop
    )
    evaluation = measure(run, config, index, labels, poses, proper_rotation=proper_rotation)
    rows = evaluation.worst(worst)
    content = {
        **results(evaluation),
        "groups": groups or "of the data",
        "worst": report.of_poses(evaluation, rows.tolist()),
    }
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


def grouped(index: Index, groups: str, data: Sequence[DataConfig] = ()) -> Index:
    """The index with other groups: stretches of N images in their order, or images with the same text.

    Args:
        groups: the number N; or a column of the boxes file, which has that text; or a regular expression, whose
            parentheses, or else the whole of it, hold that text in an image's name.
        data: the index's source, for the boxes file; of several sources none is read.

    Raises:
        UserError: it is neither, or the expression is not found in a name.
    """
    if not groups:
        raise UserError("--groups '': expected a number of images, a column of the boxes file or an expression")
    file = box_file(data[0]) if len(data) == 1 else None
    column = None if file is None else column_of(file, groups)
    try:
        if groups.isdecimal():
            keys = [str(row // int(groups)) for row in range(len(index))]
        elif column is not None:
            keys = [column.get(plain_name(name), "") for name in index.paths]
        else:
            found = map(re.compile(groups).search, index.paths)
            keys = ["" if match is None else str(match.groups() or [match[0]]) for match in found]
    except (re.error, ValueError, ZeroDivisionError) as error:
        raise UserError(f"--groups {groups}: {error}; expected a number of images or a regular expression") from error
    if "" in keys:
        raise UserError(f"--groups {groups}: no such column, or no such text for {index.paths[keys.index('')]}")
    return dataclasses.replace(index, group=np.unique(keys, return_inverse=True)[1])


def _title(evaluation: Evaluation) -> str:
    """The checkpoint, the number of poses that were measured, and why others were not."""
    errors = evaluation.errors
    left_out = f", left out: {errors.reasons}" if errors.reasons else ""
    return f"{evaluation.run.path}, {errors.measured} hands{left_out}"


def _name(run: PoseRun) -> str:
    """Name of a run: of its folder, or of a checkpoint outside a run's folder."""
    return run.path.parent.parent.name if run.path.parent.name in (BEST, CHECKPOINTS) else run.path.stem

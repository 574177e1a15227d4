"""Measures the networks of a study on held-out hands, and the constant predictions beside which they are seen."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.studies.study import Study
from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.constants import evaluation_constants, mean_keypoints_px
from peclr_dali.train.evaluation.network_errors import evaluation_config, measure
from peclr_dali.train.pose.inference import Poses, estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.pose.sample_errors import with_true_root
from peclr_dali.train.runs.checkpoint import CHECKPOINTS, Checkpoints, find_checkpoint
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import whole_file

Arrays = dict[str, npt.NDArray[Any]]

ANGLES_DEG: Final = np.linspace(-80, 80, 17)
SHIFTS_PX: Final = np.linspace(-25, 25, 5)
SIDE_PX: Final = 128.0
"""Places of the maps: angles, and shifts along each axis in pixels of a view of 128, the paper's. It shows a range of
shifts as large as this."""


def measured_errors(study: Study, seed: int, name: str) -> Arrays:
    """Errors of an arm's network on N held-out images.

    Read-outs are measured with the true depth of the root: they would have it from the size of the predicted bones
    alone, which shrink where they are unsure.

    Returns:
        The table (N, K) of each metric that the labels allow, before the mean, and "groups", (N,) group numbers, as for
        `confidence_intervals`. They are kept in a file, and measured again if the network or the images change.
    """
    by = study.measured[study.measured[name].network or name].by
    return _kept(study, seed, name, f"errors_{by}", by == "probe")


def measured_maps(study: Study, seed: int, name: str) -> Arrays:
    """The equivariance errors of an arm's network as `measure_maps` gives them, in a file as in `measured_errors`."""
    return _kept(study, seed, name, "map", False)


def _kept(study: Study, seed: int, name: str, kind: str, true_root: bool) -> Arrays:
    folder, images = study.run_of(name, seed), study.held_out(name)
    network = Checkpoints(folder / CHECKPOINTS, keep=1).latest() or find_checkpoint(folder, "a run of this study")
    file = study.folder / f"seed_{seed}" / f"{kind}_{name}.npz"
    made_from = json.dumps([checksum(network), true_root, *images])
    if file.exists():
        with np.load(file) as saved:
            if str(saved["made_from"]) == made_from:
                return {key: saved[key] for key in saved.files if key != "made_from"}
    run = load_pose_run(network)
    arrays = measure_maps(run, images) if kind == "map" else measure_errors(run, images, true_root=true_root)
    with whole_file(file) as out:
        np.savez(out, made_from=made_from, **arrays)  # type: ignore[arg-type]
    return arrays


def checksum(checkpoint: Path) -> str:
    """A checksum of a checkpoint in 8 hexadecimal digits, from those of its parts, which torch.save's archive lists."""
    with zipfile.ZipFile(checkpoint) as archive:
        parts = [(part.filename, part.CRC) for part in archive.infolist()]
    return f"{zlib.crc32(repr(parts).encode()):08x}"


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


def measure_errors(run: PoseRun, overrides: Sequence[str], *, true_root: bool = False) -> Arrays:
    """Errors of a network as `measured_errors` gives them, with the predicted depth of the root or the label's."""
    images = HeldOut(run, overrides)
    with progress_bar("measuring") as progress:
        poses = images.poses(images.index, progress=progress)
    if true_root:
        root = HAND.keypoints.index(images.config.pose.root)
        poses = with_true_root(poses, images.labels, root)
    tables = measure(run, images.config, images.index, images.labels, poses).errors.tables
    group = images.index.group
    return {**tables, "groups": np.arange(len(images.index)) if group is None else group}


def measure_maps(run: PoseRun, overrides: Sequence[str]) -> Arrays:
    """Equivariance errors |t f(I) - f(t(I))| of the 2D keypoints over grids (paper, supplement, section 6).

    f(I) comes from the canonical view, f(t(I)) from the same view after rotation or shift, made from the source. The
    two are compared in the source's frame, which is t^-1 applied to both; t keeps lengths.

    Returns:
        "rotation_deg" (R,) and "shift_px" (T,), the places; "rotation_error_px" (R,) and "shift_error_px" (T, T), y
        before x: means over images and keypoints. Pixels are those of a view of 128. And, if the labels allow it,
        "constant_rotation_error_px" (R,), of the mean keypoints as a constant prediction: they stay where they are, so
        each errs by the chord that it should have moved along. The error of any constant under a shift is its length.

    Raises:
        UserError: images without boxes, which cannot be shifted.
    """
    images = HeldOut(run, overrides)
    index = images.index
    if (index.box_px[:, 2] <= 0).any():
        raise UserError(f"{index.root} ({index.name}): has images without boxes; the maps shift boxes. Give data.box")
    still = images.poses(index)
    view_px_per_px = np.sqrt(np.abs(np.linalg.det(still.source_to_view_px[:, :, :2])))  # (N,)

    def error_px(x_px: float, y_px: float, rotation_deg: float) -> float:
        moved = images.poses(shifted(index, (x_px, y_px)), rotation_deg=rotation_deg)
        distance_px = np.linalg.norm(moved.keypoints_px - still.keypoints_px, axis=2).mean(axis=1) * view_px_per_px
        same = moved.samples == still.samples  # a bad file may have had two substitutes
        return float(distance_px[same].mean()) * SIDE_PX / images.config.geometry.side_px

    places = [(0.0, 0.0, angle) for angle in ANGLES_DEG] + [(x, y, 0.0) for y in SHIFTS_PX for x in SHIFTS_PX]
    errors = np.empty(len(places))
    with progress_bar("equivariance") as progress:
        for number, place in enumerate(places):
            errors[number] = error_px(*place)
            progress(number + 1, len(places))
    rotation_error_px, shift_error_px = np.split(errors, [len(ANGLES_DEG)])
    centre_px, side_px = index.box_px[:, None, :2], index.box_px[:, None, 2]
    distance_px = np.linalg.norm(mean_keypoints_px(images.labels, index.box_px) - centre_px, axis=2) / side_px * SIDE_PX
    chords_px = 2 * np.mean(distance_px) * np.sin(np.radians(np.abs(ANGLES_DEG)) / 2)
    constant = {"constant_rotation_error_px": chords_px} if np.isfinite(chords_px).all() else {}
    return {
        "rotation_deg": ANGLES_DEG,
        "rotation_error_px": rotation_error_px,
        "shift_px": SHIFTS_PX,
        "shift_error_px": shift_error_px.reshape(len(SHIFTS_PX), len(SHIFTS_PX)),
        **constant,
    }


def shifted(index: Index, shift_px: tuple[float, float]) -> Index:
    """The index with its boxes moved, so that what the views show is shifted by (x, y) pixels of a view of 128."""
    x, y = shift_px
    box_px = index.box_px.copy()
    side = index.box_px[:, 2] / SIDE_PX
    box_px[:, 0] -= np.where(index.mirrored, -x, x) * side
    box_px[:, 1] -= y * side
    return dataclasses.replace(index, box_px=box_px)


def measure_constants(overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Errors of constant predictions on the images that `overrides` choose, see train/evaluation/constants.py."""
    index = load_index(load_config(FinetuneConfig, (), overrides).data)
    return evaluation_constants(index, labels_to_learn(index))

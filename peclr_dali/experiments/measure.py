"""Measures the networks of a study on held-out hands, and the constant predictions beside which they are seen."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.experiments.config import Maps, Plan
from peclr_dali.models.config import PoseConfig
from peclr_dali.parsing import regular
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig, FinetuneDataConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.constants import constant_pose_errors, evaluation_constants, mean_keypoints_px
from peclr_dali.train.evaluation.network_errors import evaluation_config, held_out_config, measure
from peclr_dali.train.pose.inference import Poses, estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.pose.sample_errors import with_true_root
from peclr_dali.train.runs.checkpoint import CHECKPOINTS, Checkpoints, find_checkpoint
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import whole_file

Arrays = dict[str, npt.NDArray[Any]]

ROTATION_DEG = 80.0
SHIFT_PX = 25.0
SIDE_PX = 128.0
"""Side of a view in the paper, whose pixels are the unit of shifts and errors of the maps."""


def measured_errors(plan: Plan, seed: int, name: str) -> Arrays:
    """The errors of an arm as `measure_errors` gives them; read from a file if that was made from this network, on
    these images. A damaged file is a `UserError`.

    Read-outs are measured with the true depth of the root: they would have it from the size of the predicted bones
    alone, which shrink where they are unsure.
    """
    by = plan.by(plan.arms[name].network or name)
    if by == "probe":
        return _kept(plan, seed, f"errors_{by}", name, partial(measure_errors, true_root=True), [1])
    return _kept(plan, seed, f"errors_{by}", name, measure_errors)


def measured_maps(plan: Plan, maps: Maps, seed: int, name: str) -> Arrays:
    """The equivariance errors of an arm as `measure_maps` gives them, in a file as in `measured_errors`."""
    grids = [maps.rotations, maps.translations]
    return _kept(plan, seed, "map", name, lambda run, images: measure_maps(run, images, maps), grids)


def _kept(
    plan: Plan,
    seed: int,
    kind: str,
    name: str,
    measure: Callable[[PoseRun, Sequence[str]], Arrays],
    others: Sequence[int] = (),
) -> Arrays:
    """The arrays of a file; measured again if they were made from another network, other images or `others`."""
    network, images = network_file(plan, seed, name), plan.held_out(name, seed)
    made_from = json.dumps([checksum(network), *others, *images])
    file = plan.folder(seed, kind, name).with_suffix(".npz")
    if file.exists():
        with damage_in_one_line(file), regular(file).open("rb") as opened, np.load(opened) as saved:
            arrays: Arrays = dict(saved.items())
            before, digest = str(arrays.pop("made_from", "")), arrays.pop("digest", None)
            if before == made_from and digest != _digest(arrays):
                raise ValueError("its arrays were changed")
        if before == made_from:
            return arrays
    arrays = measure(load_pose_run(network), images)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as out:
        np.savez(out, made_from=made_from, digest=_digest(arrays), **arrays)  # type: ignore[arg-type]
    return arrays


def _digest(arrays: Arrays) -> int:
    parts = [(name, str(array.dtype), array.shape, zlib.crc32(array.tobytes())) for name, array in arrays.items()]
    return zlib.crc32(repr(parts).encode())


def checksum(checkpoint: Path) -> str:
    """A checksum of a checkpoint in 8 hexadecimal digits, from those of its parts, which torch.save's archive lists."""
    with damage_in_one_line(checkpoint), zipfile.ZipFile(regular(checkpoint)) as archive:
        parts = [(part.filename, part.CRC) for part in archive.infolist()]
    return f"{zlib.crc32(repr(parts).encode()):08x}"


@contextmanager
def damage_in_one_line(file: Path) -> Iterator[None]:
    """Turn any error of reading a file beside the runs into a `UserError`: NumPy and zipfile raise many kinds."""
    try:
        yield
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "pickle" in why:  # NumPy advises running the file's code
            why = "no archive of arrays"
        raise UserError(f"{file} cannot be used ({why}): remove it, and this command makes it again") from error


def require_held_out(plan: Plan) -> None:
    """Raise a `UserError` if the images on which an arm is measured cannot be listed: before hours of training."""
    listed = []
    for name, arm in plan.arms.items():
        trained, _ = plan.settings(FinetuneConfig, arm.network or name, plan.study.seeds[0])
        for overrides in {tuple(plan.held_out(name, seed)): None for seed in plan.study.seeds}:
            data = held_out_config(trained, (), overrides).data
            if data not in listed:
                load_index(data)
                listed.append(data)


def network_file(plan: Plan, seed: int, name: str) -> Path:
    """The newest checkpoint of an arm, which is measured."""
    folder = plan.run_of(name, seed)
    return Checkpoints(folder / CHECKPOINTS, keep=1).latest() or find_checkpoint(folder, "a run of this study")


class HeldOut:
    """A network and the images to measure it on, as `evaluation_config` chooses them."""

    def __init__(self, run: PoseRun, overrides: Sequence[str]) -> None:
        self.run, self.config = run, evaluation_config(run, (), overrides)
        self.index = load_index(self.config.data)
        self.labels = labels_to_learn(self.index, self.config.pose)

    def poses(self, index: Index, **options: Any) -> Poses:
        """The poses that the network predicts in one process, for this index or one with other boxes."""
        world = single_process(self.config.train.device)
        return estimate_poses(self.run.network, index, self.labels.intrinsics, self.config, world, **options)


def measure_errors(run: PoseRun, overrides: Sequence[str], *, true_root: bool = False) -> Arrays:
    """Errors of a network on N images, with the predicted depth of the root or the label's.

    Returns:
        The table (N, K) of each metric that the labels allow, before the mean, and "groups", (N,) group numbers, as for
        `confidence_intervals`.
    """
    images = HeldOut(run, overrides)
    with progress_bar("measuring") as progress:
        poses = images.poses(images.index, progress=progress)
    if true_root:
        root = images.labels.skeleton.keypoints.index(images.config.pose.root)
        poses = with_true_root(poses, images.labels, root)
    tables = measure(run, images.config, images.index, images.labels, poses).tables
    group = images.index.group
    return {**tables, "groups": np.arange(len(images.index)) if group is None else group}


def measure_maps(run: PoseRun, overrides: Sequence[str], maps: Maps) -> Arrays:
    """Equivariance errors |t f(I) - f(t(I))| of the 2D keypoints at each place of the grids (paper, supplement).

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

    angles = np.linspace(-ROTATION_DEG, ROTATION_DEG, maps.rotations)
    shifts = np.linspace(-SHIFT_PX, SHIFT_PX, maps.translations)
    places = [(0.0, 0.0, angle) for angle in angles] + [(x, y, 0.0) for y in shifts for x in shifts]
    errors = np.empty(len(places))
    with progress_bar("equivariance") as progress:
        for number, place in enumerate(places):
            errors[number] = error_px(*place)
            progress(number + 1, len(places))
    rotation_error_px, shift_error_px = np.split(errors, [len(angles)])
    centre_px, side_px = index.box_px[:, None, :2], index.box_px[:, None, 2]
    distance_px = np.linalg.norm(mean_keypoints_px(images.labels, index.box_px) - centre_px, axis=2) / side_px * SIDE_PX
    chords_px = 2 * np.mean(distance_px) * np.sin(np.radians(np.abs(angles)) / 2)
    constant = {"constant_rotation_error_px": chords_px} if np.isfinite(chords_px).all() else {}
    return {
        "rotation_deg": angles,
        "rotation_error_px": rotation_error_px,
        "shift_px": shifts,
        "shift_error_px": shift_error_px.reshape(len(shifts), len(shifts)),
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


def measure_constants(overrides: Sequence[str]) -> dict[str, float]:
    """Errors of constant predictions on the images that `overrides` choose, see train/evaluation/constants.py.

    The joints and poses are made from the dataset's training split, the mean keypoints from the measured images.
    Without labels in 3D, or a training split, there are only the mean keypoints.
    """
    held_out = load_config(FinetuneConfig, (), overrides).data
    assert isinstance(held_out, FinetuneDataConfig)
    index = load_index(held_out)
    measured = labels_to_learn(index, PoseConfig())
    mean_keypoints = {"mean_keypoints_epe_px": evaluation_constants(index, measured)["mean_keypoints"]["epe_px"]}
    if not measured.in_metres:
        return mean_keypoints
    try:
        known = labels_to_learn(load_index(dataclasses.replace(held_out, part="training", split="train")), PoseConfig())
    except UserError:  # the dataset is for evaluation only
        return mean_keypoints
    errors = constant_pose_errors(known.joints.astype(np.float64), measured.joints.astype(np.float64))
    return {
        "mean_joints_epe_cm": errors["mean_joints"]["epe_cm"],
        "mean_joints_auc": errors["mean_joints"]["auc"],
        "mean_pose_pa_epe_cm": errors["mean_pose"]["pa_epe_cm"],
        "rigid_hand_pa_epe_cm": errors["rigid_pose"]["pa_epe_cm"],
        **mean_keypoints,
    }

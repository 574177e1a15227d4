"""The `predict` command: poses in a user's own pictures."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, parse_json, regular
from peclr_dali.pipelines.arrays import DoubleArray, FloatArray
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig, refuse_among_images
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.files.image_file import MAX_PIXELS, MIN_PIXELS
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index, squares_around
from peclr_dali.pipelines.samples.rules import CAMERA, OFF_CENTRE, are_cameras, validate
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import (
    TURNS_DEG,
    Poses,
    Progress,
    canonical_loader,
    estimate_steps,
    from_view,
    spread_px,
)
from peclr_dali.train.pose.labels import cameras_of
from peclr_dali.train.pose.pictures import prediction_pictures
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.pose.predictions import FILE, Prediction, Predictions, earlier_drawings, write_predictions
from peclr_dali.train.runs.pictures import read_picture, save_sheet

EXPECTED = f"JPEG, PNG or WebP of {MIN_PIXELS} to {MAX_PIXELS:,} pixels; convert other formats"
_BATCH = 16  # hands in a step; a call that is stopped loses those of its last step


def predict(
    run: Path,
    images: Sequence[str],
    out: Path,
    *,
    box_px: Sequence[float] | None = None,
    boxes: Path | None = None,
    intrinsics: Path | None = None,
    scale_m: float | None = None,
    drawings: int = 1000,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Predictions:
    """Predict the pose in each readable picture, or in each box of it; write `predictions.json` and drawings.

    The pictures become an index, and go through the loader as canonical views, as those of `evaluate` do.

    Args:
        run: a fine-tuning run's folder, or a checkpoint.
        images: files and folders. Of a folder, JPEGs, PNGs and WebPs are taken, as `data.source = "folder"` does.
        out: folder for the results, outside the folders of pictures.
        box_px: x0, y0, x1, y1 of a box around the hand, in pixels of the picture as displayed; None: the whole
            picture.
        boxes: a file of boxes, as `data.box`; then `images` is the folder that its names are relative to. Each hand is
            a prediction; left ones are mirrored for the network.
        intrinsics: JSON file with the camera matrix of the pictures; None: the focal length is the picture's longer
            side and the principal point its centre.
        scale_m: length of the reference bone in metres; None: the pose is in units of that length.
        drawings: number of predictions to draw, the first ones.
        force: use `out` even if it holds files that are not of this command, and replace them.
        progress: called with (hands done, hands in all).

    Raises:
        UserError: an argument cannot be used, or no picture can be read.
    """
    hands = _hands(images, box_px, boxes, out)
    validate(hands)
    earlier = earlier_drawings(out, force=force)
    world = single_process()
    loaded = load_pose_run(run, world.device)
    _, first, picture_of = np.unique(hands.paths, return_index=True, return_inverse=True)
    sizes_px = image_sizes_px(hands.read_many(first.tolist()))[picture_of]  # as displayed; 0 for no usable picture
    cameras = cameras_of(sizes_px.max(axis=1), sizes_px[:, ::-1] / 2)  # a field of view of 53 degrees
    rows, unreadable = np.flatnonzero(sizes_px[:, 0] > 0), np.flatnonzero(sizes_px[:, 0] == 0).tolist()
    if intrinsics is not None:
        cameras[:] = read_intrinsics(intrinsics)
        if (off := np.abs(2 * cameras[rows, :2, 2] / sizes_px[rows, ::-1] - 1).max(axis=1) > OFF_CENTRE).any():
            logging.getLogger(__name__).warning(
                "%s: cx, cy is far from the middle of the pictures of %d of %d hands; unless these are parts of larger "
                "ones, this is the camera of pictures of another size, or before EXIF turned them. Give theirs",
                *(intrinsics, off.sum(), len(rows)),
            )
    results = Predictions(loaded.path, "reference_bone" if scale_m is None else "m", intrinsics is None, len(hands))
    results.unreadable += dict.fromkeys(hands.path(row) for row in unreadable)
    if not len(rows):
        raise UserError(
            f"none of {len(results.unreadable)} pictures can be used, such as {hands.path(0)}; expected {EXPECTED}"
        )
    results.hands_done = len(unreadable)
    # Of a whole picture, the side stays 0.
    hands = replace(hands, box_px=(hands.box_px * np.array([1, 1, loaded.box_margin])).astype(np.float32))
    config, wanted = replace(loaded.config, pipelines=PipelinesConfig()), iter(rows.tolist())
    try:
        with ExitStack() as loaders:
            steps_of_turns = []
            for turn_deg in (0.0, *TURNS_DEG):
                loader = loaders.enter_context(
                    canonical_loader(hands, rows, min(_BATCH, len(rows)), config, world, turn_deg)
                )
                steps_of_turns.append(
                    estimate_steps(loaded.network, loader, cameras, config, world, len(rows), keep_images=len(rows))
                )
            for poses, *turned in zip(*steps_of_turns, strict=True):
                predictions = _predictions(loaded, hands, cameras, poses, spread_px(turned), scale_m or 1.0)
                for place, sample in enumerate(poses.samples.tolist()):
                    row = next(wanted)
                    results.hands_done += 1
                    if sample == row:
                        results.predictions.append(predictions[place])
                        if len(results.predictions) <= drawings:
                            _draw(out, results, poses, place, scale_m or 1.0)
                    elif hands.path(row) not in results.unreadable:  # its picture does not decode
                        results.unreadable.append(hands.path(row))
                progress(results.hands_done, results.hands)
        results.complete = True
    finally:  # also of a call that is stopped
        if results.predictions:
            write_predictions(out, results)
            pictures = [hands.path(row) for row in range(len(hands))]
            pictures_in_out = {picture.name for picture in pictures if picture.parent == out.absolute()}
            for name in earlier - pictures_in_out - {prediction.drawing for prediction in results.predictions}:
                (out / name).unlink(missing_ok=True)
            if not results.complete:
                logging.getLogger(__name__).warning(
                    "%s has %d of %d hands: the call was stopped", out / FILE, results.hands_done, results.hands
                )
    return results


def _hands(images: Sequence[str], box_px: Sequence[float] | None, boxes: Path | None, out: Path) -> Index:
    """The hands of a file of boxes; or the pictures in the order given, each once, whole or a single one with a box."""
    for word in images:
        is_utf8 = word == word.encode(errors="ignore").decode()
        if not word or not Path(word).exists() or (Path(word).is_dir() and not is_utf8):
            raise UserError(f"{word!r}: no picture, and no folder of pictures with a name in UTF-8. Check the path")
    paths = [Path(word).absolute() for word in images]
    folders = {path: DataConfig("folder", str(path), box=str(boxes or "center")) for path in paths if path.is_dir()}
    refuse_among_images(out, folders.values())
    if boxes is not None:
        if len(paths) != 1 or not folders:
            raise UserError(
                f"--box {boxes}: expected one folder, which its names are relative to; found {list(images)}"
            )
        return load_folder(folders[paths[0]])
    files: dict[Path, None] = {}
    for path in paths:
        index = load_folder(folders[path]) if path in folders else None
        files |= dict.fromkeys([path] if index is None else map(index.path, range(len(index))))
    squares = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(files), 1))
    if box_px is not None:
        if len(files) != 1:
            raise UserError(f"--box names one place, and there are {len(files)} pictures: give a file of boxes")
        squares = squares_around(np.array([box_px[:2]]), np.array([box_px[2:]]))
    return Index("pictures", Path("/"), list(map(str, files)), squares, label_file="--box")


def _predictions(
    run: PoseRun, hands: Index, cameras: FloatArray, poses: Poses, spreads_px: DoubleArray, scale_m: float
) -> list[Prediction]:
    """The n predictions of a step, without drawings; `spreads_px` (n,) as of `spread_px`."""
    if not np.isfinite(poses.keypoints_px).all():
        raise UserError(f"{run.path}: gives keypoints that are NaN or infinite; use another checkpoint")
    side_px = float(run.config.geometry.side_px)
    corners_px = torch.tensor([[0.0, 0.0], [side_px, side_px]], dtype=torch.float64).expand(len(poses.samples), 2, 2)
    corners_px = from_view(corners_px, torch.from_numpy(poses.source_to_view_px))
    edges_px = np.sort(corners_px.numpy(), axis=1).reshape(-1, 4)
    return [
        Prediction(
            image=hands.path(sample),
            drawing=None,
            box_px=edges_px[place],
            mirrored=bool(hands.mirrored[sample]),
            keypoints_px=poses.keypoints_px[place],
            spread_px=round(float(spreads_px[place]), 3),
            joints=scale_m * poses.joints[place] if run.depth else None,
            intrinsics=cameras[sample].astype(np.float64),
        )
        for place, sample in enumerate(poses.samples.tolist())
    ]


def _draw(out: Path, results: Predictions, poses: Poses, place: int, scale_m: float) -> None:
    """Draw the last prediction of the results, at a place in the poses of a step, and name the drawing in it."""
    number, prediction = len(results.predictions) - 1, results.predictions[-1]
    if number == 0:  # from it, a later call knows that the drawings are of this command, also if this one is killed
        write_predictions(out, replace(results, predictions=[]))
    picture = read_picture(prediction.image)
    if picture is not None:
        prediction.drawing = f"{number:04}_{prediction.image.stem[:60]}.jpg"
        pose = None if prediction.joints is None else prediction.joints / scale_m  # in reference bones
        view = (poses.images[place], poses.source_to_view_px[place], prediction.keypoints_px)
        save_sheet(out / prediction.drawing, prediction_pictures(picture, prediction.box_px, *view, pose), columns=3)


def read_intrinsics(file: Path) -> FloatArray:
    """Read the camera matrix of a JSON file: [[fx, s, cx], [0, fy, cy], [0, 0, 1]], in pixels.

    Raises:
        UserError: the file has no camera matrix.
    """
    try:
        camera = as_numbers(parse_json(regular(file).read_bytes()))
    except ValueError:
        camera = None
    if camera is None or camera.shape != (3, 3) or not are_cameras(camera[None])[0]:
        raise UserError(
            f"{file} holds no camera matrix in pixels: expected a single one for all pictures, [[fx, s, cx], "
            f"[0, fy, cy], [0, 0, 1]], with {CAMERA}"
        )
    return camera.astype(np.float32)

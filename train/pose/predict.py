"""The `predict` command: poses in a user's own pictures."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.machine.cores import available_cores
from peclr_dali.models.pose import view_intrinsics
from peclr_dali.parsing import as_numbers, parse_json, regular, require_results_of
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.image_file import MAX_PIXELS, MIN_PIXELS
from peclr_dali.pipelines.render.cpu_views import start_views
from peclr_dali.pipelines.samples.box_check import check_boxes
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.sources.boxes import squares_around
from peclr_dali.pipelines.sources.folder import files_under, load_folder
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import Progress, canonical_view, from_view, inference, with_wrist
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run, require_finite
from peclr_dali.train.pose.predictions import FILE, Predicted, Prediction, save_drawing, write_predictions
from peclr_dali.train.runs.pictures import Image

Box = tuple[float, float, float, float]
Cameras = npt.NDArray[np.float32]

ENDINGS: Final = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp", ".jp2", ".ppm", ".pgm",
)  # fmt: skip
"""Endings of the files to take from a folder. A file given by name is always tried."""

FOCAL_RANGE_PX: Final = (10.0, 1e6)
"""Range of focal lengths. A smaller one is probably in picture widths or millimetres. No other entry of the matrix may
be larger than the maximum, so that float32 can invert it."""

_AT_ONCE: Final = 8
"""Pictures in memory at once."""


def predict(
    run: Path,
    images: Sequence[str],
    out: Path,
    *,
    box_px: Box | None = None,
    boxes: Path | None = None,
    intrinsics: Path | None = None,
    scale_m: float | None = None,
    drawings: int | None = None,
    progress: Progress | None = None,
) -> Predicted:
    """Predict the pose in each readable picture, or in each box of it; write `predictions.json` and drawings.

    OpenCV decodes the pictures, once each and a few at a time, with the EXIF orientation applied: it reads more formats
    than training does. The views are planned and made as those of training on a CPU, without augmentation.

    Args:
        run: a fine-tuning run's folder, or a checkpoint.
        images: files and folders.
        out: folder for the results; it must not hold any of the pictures that are given by name.
        box_px: x0, y0, x1, y1 of a box around the hand, in pixels of the picture as displayed; None: the whole
            picture.
        boxes: a file of boxes, as `data.box`; then `images` is the folder that its names are relative to. Each hand is
            a prediction; left ones are mirrored for the network.
        intrinsics: JSON file with the camera matrix of the pictures; None: the focal length is the picture's longer
            side and the principal point its centre.
        scale_m: length of the reference bone in metres; None: the pose is in units of that length.
        drawings: number of predictions to draw, the first ones; None: all.
        progress: called with (pictures done, pictures in all).

    Raises:
        UserError: an argument cannot be used, or no picture can be read.
    """
    hands = _pictures(images, box_px, out) if boxes is None else _pictures_with_boxes(images, boxes)
    rows_of: dict[Path, list[int]] = {}
    for row in range(len(hands)):
        rows_of.setdefault(hands.path(row), []).append(row)
    files = list(rows_of)
    check_boxes(hands)
    names = drawing_names([hands.path(row) for row in range(len(hands))][:drawings])
    require_results_of("predict", out, [FILE, *names], lambda found: {"checkpoint", "predictions"} <= found.keys())
    loaded = load_pose_run(run, single_process().device)
    camera = None if intrinsics is None else read_intrinsics(intrinsics)
    done = Predicted(
        checkpoint=loaded.path,
        unit="reference_bone" if scale_m is None else "m",
        intrinsics_assumed=camera is None,
        predictions=[],
        unreadable=[],
    )
    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            for first in range(0, len(files), _AT_ONCE):
                group = files[first : first + _AT_ONCE]
                read = dict(zip(group, pool.map(_read, group), strict=True))
                done.unreadable.extend(str(error) for error in read.values() if isinstance(error, UserError))
                seen = {file: picture for file, picture in read.items() if not isinstance(picture, UserError)}
                if rows := [row for file in seen for row in rows_of[file]]:
                    pictures = [seen[hands.path(row)] for row in rows]
                    found = _predicted(loaded, pool, hands.select(np.array(rows)), pictures, camera, scale_m)
                    _write(out, done, found, pictures, names)
                if progress is not None:
                    progress(first + len(group), len(files))
    finally:  # also of a call that is stopped
        if done.predictions:
            write_predictions(out, done)
    if not done.predictions:
        many = f"none of {len(files)} pictures can be used; the first: " if len(files) > 1 else ""
        raise UserError(f"{many}{done.unreadable[0]}")
    return done


def _predicted(
    run: PoseRun,
    pool: ThreadPoolExecutor,
    hands: Index,
    pictures: Sequence[Image],
    camera: Cameras | None,
    scale_m: float | None,
) -> list[Prediction]:
    """Make the canonical views of N hands in N pictures (H, W, 3), and give them to the network."""
    count, device, augmentation = len(pictures), single_process().device, canonical_view(run.config.geometry)
    sizes_px = np.array([picture.shape[:2] for picture in pictures], np.int64)
    whole_px = np.column_stack([sizes_px[:, ::-1] / 2, sizes_px.max(axis=1)])
    margin = np.array([1, 1, run.box_margin])
    box_px = np.where(hands.box_px[:, 2:] > 0, hands.box_px * margin, whole_px).astype(np.float32)
    draws = draw_view(augmentation, seed=0, epoch=0, view=0, places=np.arange(count))
    upright, geometry = np.ones(count, np.int64), augmentation.geometry
    plan = plan_views(sizes_px, upright, box_px, [draws], [geometry], mirror=hands.mirrored)
    views = torch.empty(count, geometry.side_px, geometry.side_px, 3, dtype=torch.uint8)
    addresses = np.array([picture.ctypes.data for picture in pictures], np.int64)
    for share in start_views(pool, available_cores(), addresses, pictures, plan, [augmentation], [views]):
        share.result()

    sides = zip(sizes_px[:, 1].tolist(), sizes_px[:, 0].tolist(), strict=True)
    cameras = np.stack([assumed_intrinsics(*side) if camera is None else camera for side in sides])
    to_view = torch.from_numpy(plan.source_to_view_px[0])
    of_view = view_intrinsics(torch.from_numpy(cameras), to_view)
    with inference(device):
        output = run.network(views.permute(0, 3, 1, 2).to(device), of_view.to(device))
    joints = output.joints.double().cpu().numpy()
    in_picture = from_view(output.keypoints_px.double().cpu(), to_view.double())
    require_finite(run.path, in_picture)
    keypoints_px = with_wrist(in_picture.numpy(), joints, cameras, run.config.pose)
    edges_px = np.column_stack([box_px[:, :2] - box_px[:, 2:] / 2, box_px[:, :2] + box_px[:, 2:] / 2])
    return [
        Prediction(
            image=hands.path(row),
            drawing=None,
            keypoints_px=keypoints_px[row],
            joints=joints[row] * (scale_m or 1.0) if run.depth else None,
            box_px=edges_px[row].astype(np.float64),
            mirrored=bool(hands.mirrored[row]),
            intrinsics=cameras[row].astype(np.float64),
        )
        for row in range(count)
    ]


def _write(
    out: Path, done: Predicted, found: Sequence[Prediction], pictures: Sequence[Image], names: Sequence[str]
) -> None:
    """Draw some predictions, and append them to those that are done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not done.predictions:
            write_predictions(out, done)  # from it, a later call knows that the drawings are of this command
        for one, picture in zip(found, pictures, strict=True):
            number = len(done.predictions)
            if number < len(names):
                one = replace(one, drawing=out / names[number])
                save_drawing(out / names[number], picture, one, done)
            done.predictions.append(one)
    except OSError as error:
        raise UserError(f"{out} cannot be written to: {error.strerror or error}; name another with --out") from error


def _pictures(images: Sequence[str], box_px: Box | None, out: Path) -> Index:
    """The pictures in the order given: each whole, or a single one with a box."""
    found = find_images(images, out)
    if box_px is not None and len(found) > 1:
        raise UserError(
            f"--box names one place, and there are {len(found)} pictures: predict them one by one, or give a file of "
            "boxes"
        )
    squares = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(found), 1))
    if box_px is not None:
        squares = squares_around(np.array([box_px[:2]]), np.array([box_px[2:]]))
    return Index("pictures", Path("/"), [str(file.absolute()) for file in found], squares)


def _pictures_with_boxes(images: Sequence[str], boxes: Path) -> Index:
    """The hands of a file of boxes, as pre-training takes them."""
    if len(images) != 1 or not Path(images[0]).is_dir():
        raise UserError(
            f"--box {boxes}: expected one folder, which the names in this file are relative to; found "
            f"{' '.join(images)}"
        )
    return load_folder(DataConfig("folder", str(Path(images[0]).absolute()), box=str(boxes)))


def find_images(words: Sequence[str], out: Path) -> list[Path]:
    """Find pictures: each word is a file, or a folder of pictures. Each file is listed once, in order.

    Folders are searched as `load_folder` does, with the folders in them, but without `out`, the folder of results.

    Raises:
        UserError: a word is neither, or is a picture in the folder of results.
    """
    results = os.path.realpath(out)  # unlike `resolve`, it takes a link to itself
    found: dict[Path, None] = {}
    for word in words:
        path = Path(word)
        if word and path.is_dir():
            files = sorted(path / name for name in files_under(path, ENDINGS)[0])
            files = [file for file in files if not Path(os.path.realpath(file)).is_relative_to(results)]
        else:
            files = [path] if word and path.exists() else []
        if not files:
            raise UserError(f"{word!r}: no picture and no folder of pictures ({', '.join(ENDINGS)}). Check the path")
        if os.path.realpath(files[0].parent) == results:
            raise UserError(f"{files[0]}: lies in the folder of results, {out}: name another folder with --out")
        found.update(dict.fromkeys(files))
    return list(found)


def drawing_names(files: Sequence[Path]) -> list[str]:
    """A name of its own for each drawing: that of the picture, with a number from the second one on."""
    taken: dict[str, str] = {}  # some file systems know one case
    for file in files:
        names = itertools.chain([file.stem], (f"{file.stem}_{number}" for number in itertools.count(2)))
        name = next(name for name in names if name.casefold() not in taken)
        taken[name.casefold()] = f"{name}.png"
    return list(taken.values())


def read_intrinsics(file: Path) -> Cameras:
    """Read the camera matrix of a JSON file: [[fx, s, cx], [0, fy, cy], [0, 0, 1]], in pixels.

    Raises:
        UserError: the file has no camera matrix.
    """
    try:
        numbers = as_numbers(parse_json(regular(file).read_bytes()))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a JSON file with a camera matrix") from error
    except ValueError:
        numbers = None
    camera = np.empty(0) if numbers is None else numbers
    usable = camera.shape == (3, 3) and camera[2].tolist() == [0, 0, 1] and camera[1, 0] == 0
    if not usable or not (np.abs(camera) < FOCAL_RANGE_PX[1]).all() or camera.diagonal()[:2].min() < FOCAL_RANGE_PX[0]:
        raise UserError(
            f"{file} holds no camera matrix in pixels: expected a single one for all pictures, [[fx, s, cx], "
            f"[0, fy, cy], [0, 0, 1]], with fx and fy of at least {FOCAL_RANGE_PX[0]:g} pixels"
        )
    return camera.astype(np.float32)


def assumed_intrinsics(width_px: int, height_px: int) -> Cameras:
    """Camera matrix for an unknown camera: the focal length is the longer side, a field of view of 53 degrees."""
    focal_px = max(width_px, height_px)
    return np.array([[focal_px, 0, width_px / 2], [0, focal_px, height_px / 2], [0, 0, 1]], np.float32)


def _read(file: Path) -> Image | UserError:
    """A picture, or why it cannot be read."""
    try:
        return read_picture(file)
    except UserError as error:
        return error


def read_picture(file: Path) -> Image:
    """Read a picture (H, W, 3) RGB as displayed. One that is unreadable, too small or too large is a `UserError`."""
    try:
        data = np.frombuffer(regular(file).read_bytes(), np.uint8)
        decoded = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a picture") from error
    except cv2.error:  # the header has more pixels than OpenCV allows
        decoded = None
    if decoded is None:
        raise UserError(
            f"{file} is not a readable picture: expected JPEG, PNG, WebP, TIFF or BMP of at most {MAX_PIXELS} pixels. "
            "Convert it"
        )
    height, width, _ = decoded.shape
    if not MIN_PIXELS <= height * width <= MAX_PIXELS:
        raise UserError(
            f"{file} has {width} x {height} pixels; expected {MIN_PIXELS} to {MAX_PIXELS} in all. Resize or cut it"
        )
    return np.ascontiguousarray(decoded[..., ::-1], dtype=np.uint8)

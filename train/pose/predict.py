"""The `predict` command: poses in a user's own pictures."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, parse_json, regular
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.image_file import MAX_PIXELS, MIN_PIXELS
from peclr_dali.pipelines.samples.box_check import LEAST_SIDE_PX
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.samples.store import Store
from peclr_dali.pipelines.sources.boxes import squares_around
from peclr_dali.pipelines.sources.folder import files_under, load_folder
from peclr_dali.pipelines.views.reach import magnification_range
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import Poses, Progress, estimate_poses
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run, require_finite
from peclr_dali.train.pose.prediction_picture import Box, Prediction, save_prediction
from peclr_dali.train.runs.pictures import Image
from peclr_dali.writing import is_among, write_text

Cameras = npt.NDArray[np.float32]

ENDINGS: Final = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".jp2", ".ppm", ".pgm")
"""Endings of the files to take from a folder. A file given by name is always tried."""

FOCAL_RANGE_PX: Final = (10.0, 1e6)
"""Range of focal lengths. A smaller one is probably in picture widths or millimetres. No other entry of the matrix may
be larger than the maximum, so that float32 can invert it."""

SECOND_LOOK_FRAC: Final = 0.25
"""If cropping around a first prediction moves the keypoints by more than this share of the pose's extent, neither
prediction is reliable."""


class Predicted(NamedTuple):
    """Predictions for the pictures that could be read, in order, and a reason for each of the others."""

    predictions: list[Prediction]
    unreadable: list[str]


def predict(
    run: Path,
    images: Sequence[str],
    out: Path,
    *,
    box_px: Box | None = None,
    boxes: Path | None = None,
    intrinsics: Path | None = None,
    scale_m: float | None = None,
    progress: Progress | None = None,
) -> Predicted:
    """Predict the pose in each readable picture, or each box of it, and write a drawing and a JSON file of it.

    OpenCV decodes the pictures, with the EXIF orientation applied, since it reads more formats than training does. They
    then pass the training loader without augmentation.

    Args:
        run: a fine-tuning run's folder, or a checkpoint.
        images: files, folders and patterns such as "photos/*.jpg".
        out: folder for the results.
        box_px: x0, y0, x1, y1 of a box around the hand or body, in pixels of the picture as displayed; None: the whole
            picture.
        boxes: a file of boxes, as `data.box`; then `images` is the folder that its names are relative to. Each hand is
            a prediction; left ones are mirrored for the network.
        intrinsics: JSON file with the camera matrix of the pictures; None: the focal length is the picture's longer
            side and the principal point its centre.
        scale_m: length of the skeleton's reference bone in metres; None: the pose is in units of that length.

    Raises:
        UserError: an argument cannot be used, or no picture can be read.
    """
    seen = _pictures(images, box_px, out) if boxes is None else _pictures_with_boxes(images, boxes)
    loaded = load_pose_run(run, single_process().device)
    camera = None if intrinsics is None else read_intrinsics(intrinsics)
    sizes_px, unreadable = _sizes_px(list(dict.fromkeys(seen.path(row) for row in range(len(seen)))))
    seen = seen.select(np.array([row for row in range(len(seen)) if seen.path(row) in sizes_px], np.int64))
    files = [seen.path(row) for row in range(len(seen))]
    if box_px is not None:
        _check_box(box_px, sizes_px[files[0]])
    names = result_names(files, out, inputs=[*files, *(file for file in (intrinsics, boxes) if file is not None)])
    cameras = np.stack([assumed_intrinsics(*sizes_px[file]) if camera is None else camera for file in files])
    margins = np.array([1, 1, loaded.box_margin], np.float32)
    seen = dataclasses.replace(seen, box_px=seen.box_px * margins)  # a side of 0: the whole picture
    with_box = seen.box_px[:, 2] > 0
    first = _estimate(loaded, seen, cameras, progress)
    second = None if with_box.all() else _second_look(loaded, seen, first, cameras)
    results = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for row, (file, name) in enumerate(zip(files, names, strict=True)):
            needed, note = _box_needed(loaded, first, None if with_box[row] else second, row, sizes_px[file])
            result = Prediction(
                image=file,
                picture=out / f"{name}.png",
                skeleton=loaded.network.skeleton,
                keypoints_px=first.keypoints_px[row],
                joints=first.joints[row] * (1.0 if scale_m is None else scale_m) if loaded.depth else None,
                unit="reference_bone" if scale_m is None else "m",
                box_px=_shown_px(first, row, loaded.config.geometry.side_px),
                intrinsics=cameras[row].astype(np.float64),
                mirrored=bool(seen.mirrored[row]),
                intrinsics_assumed=camera is None,
                box_needed=needed,
                note=note,
            )
            # The JSON file first: from it, a later call knows the drawing's picture.
            write_text(out / f"{name}.json", json.dumps(as_json(result, loaded), indent=2) + "\n")
            save_prediction(result.picture, read_picture(str(file)), result)
            results.append(result)
    except OSError as error:
        raise UserError(f"{out} cannot be written to: {error.strerror or error}; name another with --out") from error
    return Predicted(results, unreadable)


def find_images(words: Sequence[str], out: Path) -> list[Path]:
    """Find files: each word is a file, a folder of pictures, or a pattern. Each file is listed once, in order.

    Folders are searched as `load_folder` does, with the folders in them, but without `out`, the folder of results.
    A word that matches no file is a `UserError`.
    """
    results = Path(os.path.realpath(out))  # unlike `resolve`, it takes a link to itself
    found: dict[Path, None] = {}
    for word in words:
        if not word:
            raise UserError(
                f"an IMAGE has no characters; expected pictures ({', '.join(ENDINGS)}), folders or patterns"
            )
        path = Path(word)
        if path.is_dir():
            files = sorted(path / name for name in files_under(path, ENDINGS)[0])
            if os.path.realpath(path) != str(results):
                files = [file for file in files if not Path(os.path.realpath(file)).is_relative_to(results)]
        elif path.exists():
            files = [path]
        else:
            files = sorted(file for name in glob.glob(word, recursive=True) if (file := Path(name)).is_file())  # noqa: PTH207
        if not files:
            kind = (
                "neither pictures in this folder nor below it"
                if path.is_dir()
                else "no such file, and no pattern that matches one"
            )
            raise UserError(f"{word}: {kind}; expected pictures ({', '.join(ENDINGS)}). Check the path")
        found.update(dict.fromkeys(files))
    return list(found)


def read_intrinsics(file: Path) -> Cameras:
    """Read the camera matrix (3, 3) of a JSON file: a list of three rows, {"K": rows}, or {"fx", "fy", "cx", "cy"}.

    Raises:
        UserError: the file has no camera matrix.
    """
    try:
        content = parse_json(regular(file).read_bytes())
        if isinstance(content, dict) and content.keys() >= {"fx", "fy", "cx", "cy"}:
            content = [[content["fx"], 0, content["cx"]], [0, content["fy"], content["cy"]], [0, 0, 1]]
        numbers = as_numbers(content["K"] if isinstance(content, dict) else content)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a JSON file with a camera matrix") from error
    except (ValueError, KeyError):
        numbers = None
    camera = np.empty(0) if numbers is None else numbers
    usable = camera.shape == (3, 3) and camera[2].tolist() == [0, 0, 1] and camera[1, 0] == 0
    if not usable or not (np.abs(camera) < FOCAL_RANGE_PX[1]).all() or camera.diagonal()[:2].min() < FOCAL_RANGE_PX[0]:
        raise UserError(
            f"{file} holds no camera matrix in pixels: expected a single one for all pictures, of 3 x 3, "
            '[[fx, s, cx], [0, fy, cy], [0, 0, 1]], {"K": [...]} or {"fx": ..., "fy": ..., "cx": ..., "cy": ...}, '
            f"with fx and fy of at least {FOCAL_RANGE_PX[0]:g} pixels"
        )
    return camera.astype(np.float32)


def assumed_intrinsics(width_px: int, height_px: int) -> Cameras:
    """Camera matrix for an unknown camera: the focal length is the longer side, a field of view of 53 degrees."""
    focal_px = max(width_px, height_px)
    return np.array([[focal_px, 0, width_px / 2], [0, focal_px, height_px / 2], [0, 0, 1]], np.float32)


def as_json(result: Prediction, run: PoseRun) -> dict[str, Any]:
    """A prediction as plain values, for JSON."""
    return {
        "image": str(result.image),
        "checkpoint": str(run.path),
        "skeleton": result.skeleton.name,
        "keypoints": list(result.skeleton.keypoints),
        "keypoints_px": result.keypoints_px.round(3).tolist(),
        "joints": None if result.joints is None else result.joints.round(6).tolist(),
        "unit": result.unit,
        "scale_normalised": result.unit != "m",
        "box_px": [round(edge, 2) for edge in result.box_px],
        "mirrored": result.mirrored,
        "box_needed": result.box_needed,
        "intrinsics": result.intrinsics.tolist(),
        "intrinsics_assumed": result.intrinsics_assumed,
        "note": result.note,
    }


@lru_cache(maxsize=4)
def read_picture(file: str) -> Image:
    """Read a picture (H, W, 3) RGB as displayed. One that is unreadable, too small or too large is a `UserError`."""
    try:
        data = np.frombuffer(regular(Path(file)).read_bytes(), np.uint8)
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


def _sizes_px(files: Sequence[Path]) -> tuple[dict[Path, tuple[int, int]], list[str]]:
    """Width and height of the readable pictures, at least one, and an error line for each of the others."""
    sizes_px: dict[Path, tuple[int, int]] = {}
    unreadable = []
    for file in files:
        try:
            height, width, _ = read_picture(str(file)).shape
        except UserError as error:
            unreadable.append(str(error))
        else:
            sizes_px[file] = width, height
    if not sizes_px:
        many = f"none of {len(files)} pictures can be used; the first: " if len(files) > 1 else ""
        raise UserError(f"{many}{unreadable[0]}")
    return sizes_px, unreadable


def result_names(files: Sequence[Path], out: Path, *, inputs: Sequence[Path]) -> list[str]:
    """Names of the results in the folder `out`, without ending: the picture's name, numbered if it is taken.

    Pictures of the same name in several folders get the folders' names too, such as "a_1" for a/1.jpg. A name is taken
    if a file of this name is another picture's result, no result, or one of `inputs`, the files that the command reads.
    """
    folders: dict[str, set[Path]] = {}
    for file in files:
        folders.setdefault(file.stem.casefold(), set()).add(file.absolute().parent)  # some file systems know one case
    bases = {stem: os.path.commonpath(inside) for stem, inside in folders.items()}
    stems = [
        "_".join((*file.absolute().parent.relative_to(bases[file.stem.casefold()]).parts, file.stem)) for file in files
    ]
    alike = Counter(stem.casefold() for stem in stems)
    names: dict[str, str] = {}
    for stem in stems:
        numbered = (f"{stem}_{number}" for number in itertools.count())
        others = (name for name in numbered if name.casefold() not in {*alike, *names})
        wanted = itertools.chain([stem] if alike[stem.casefold()] == 1 else [], others)
        name = next(name for name in wanted if _may_be_written(out, name, inputs))
        names[name.casefold()] = name
    return list(names.values())


def _may_be_written(out: Path, name: str, inputs: Sequence[Path]) -> bool:
    files = [out / f"{name}.png", out / f"{name}.json"]
    if not any(file.exists() for file in files):
        return True
    if any(is_among(file, inputs) for file in files):
        return False
    try:
        return {"image", "checkpoint", "keypoints_px"} <= set(parse_json(files[1].read_bytes()))
    except (OSError, ValueError, TypeError):
        return False


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
    return Index("pictures", Path(), [str(file) for file in found], squares)


def _pictures_with_boxes(images: Sequence[str], boxes: Path) -> Index:
    """The hands of a file of boxes, as pre-training takes them."""
    if len(images) != 1 or not Path(images[0]).is_dir():
        raise UserError(
            f"--box {boxes}: expected one folder, which the names in this file are relative to; found "
            f"{' '.join(images)}"
        )
    return load_folder(DataConfig("folder", images[0], box=str(boxes)))


def _check_box(box_px: Box, size_px: tuple[int, int]) -> None:
    x0, y0, x1, y1 = box_px
    width, height = size_px
    in_picture = x0 < width and y0 < height and x1 > 0 and y1 > 0
    large_enough = x0 < x1 and y0 < y1 and LEAST_SIDE_PX <= max(x1 - x0, y1 - y0) < np.inf
    if not (in_picture and large_enough):
        raise UserError(
            f"--box {x0:g},{y0:g},{x1:g},{y1:g} is no box in the picture of {width} x {height} pixels: expected "
            f"x0,y0,x1,y1 with x0 < x1 and y0 < y1, {LEAST_SIDE_PX:g} pixels or more apart, in pixels (not fractions) "
            "from the picture's upper left corner as displayed"
        )


class _Pictures(Store):
    """Pictures of any kind as PNGs that the training loader reads: upright, eight bits, no alpha."""

    def __init__(self, pictures: Index) -> None:
        self._pictures = pictures

    def read(self, row: int) -> bytes:
        bgr = read_picture(str(self._pictures.path(row)))[..., ::-1]
        return cv2.imencode(".png", bgr, [cv2.IMWRITE_PNG_COMPRESSION, 1])[1].tobytes()


def _estimate(run: PoseRun, pictures: Index, cameras: Cameras, progress: Progress | None = None) -> Poses:
    index = dataclasses.replace(pictures, store=_Pictures(pictures))
    config = dataclasses.replace(run.config, validation=dataclasses.replace(run.config.validation, batch=16))
    found = estimate_poses(run.network, index, cameras, config, single_process(), progress=progress)
    require_finite(run.path, torch.from_numpy(found.keypoints_px))
    return found


def _second_look(run: PoseRun, pictures: Index, first: Poses, cameras: Cameras) -> Poses:
    """Predict again on the part of the picture around the first prediction."""
    boxes_px = squares_around(first.keypoints_px.min(axis=1), first.keypoints_px.max(axis=1))
    boxes_px[:, 2] = np.maximum(boxes_px[:, 2], 2) * run.box_margin
    return _estimate(run, dataclasses.replace(pictures, box_px=boxes_px), cameras)


def _box_needed(
    run: PoseRun, first: Poses, second: Poses | None, row: int, size_px: tuple[int, int]
) -> tuple[Literal["no", "likely", "unknown"], str]:
    """Estimate from two predictions whether a picture needs a box."""
    name, several = run.network.skeleton.name, run.network.skeleton.plural
    if second is None:
        return "no", f"The {name} was looked for in the box that was given."
    keypoints_px = first.keypoints_px[row]
    extent_px = float(np.ptp(keypoints_px, axis=0).max())
    extent_frac = extent_px / max(size_px)
    least_frac = magnification_range(run.config.geometry)[0] / run.box_margin
    moved_px = float(np.linalg.norm(second.keypoints_px[row] - keypoints_px, axis=1).mean())
    if extent_frac < 0.8 * least_frac:
        return "likely", (
            f"The {name} seems to fill {extent_frac:.0%} of the picture; the network was trained on {several} that "
            f"fill {least_frac:.0%} or more. Give --box x0,y0,x1,y1 around the {name}."
        )
    if moved_px > SECOND_LOOK_FRAC * max(extent_px, 1):
        return "likely", (
            f"On a crop around its first prediction, the network moves the keypoints by "
            f"{moved_px / max(extent_px, 1):.0%} of the {name}'s extent. Give --box x0,y0,x1,y1 around the {name}."
        )
    return "unknown", (
        f"The whole picture was taken as the {name}'s surroundings. That is right if the {name} fills about half of it "
        f"or more; nothing here detects {several}. Else give --box x0,y0,x1,y1 around the {name}."
    )


def _shown_px(poses: Poses, row: int, side_px: int) -> Box:
    """Edges, in the picture, of the square that the network saw, mirrored or not."""
    matrix = poses.source_to_view_px[row]
    one, other = (np.linalg.solve(matrix[:, :2], corner - matrix[:, 2]) for corner in (0, side_px))
    (x0, x1), (y0, y1) = sorted((one[0], other[0])), sorted((one[1], other[1]))
    return float(x0), float(y0), float(x1), float(y1)

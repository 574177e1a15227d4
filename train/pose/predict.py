"""The `predict` command: poses in a user's own pictures."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.models.pose import view_intrinsics
from peclr_dali.parsing import as_numbers, parse_json, regular
from peclr_dali.pipelines.config import DataConfig, refuse_among_images
from peclr_dali.pipelines.files.image_file import MAX_PIXELS, MIN_PIXELS
from peclr_dali.pipelines.render.cpu_views import start_views
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.samples.rules import LEAST_FOCAL_PX
from peclr_dali.pipelines.samples.validate import validate
from peclr_dali.pipelines.sources.boxes import squares_around
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views
from peclr_dali.skeleton import HAND
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import Progress, canonical_view, from_view, inference, with_wrist
from peclr_dali.train.pose.metrics import Floats
from peclr_dali.train.pose.pictures import prediction_pictures
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run, require_finite
from peclr_dali.train.runs.pictures import Image, read_picture, save_sheet
from peclr_dali.writing import require_own_results, write_text

Box = tuple[float, float, float, float]
Cameras = npt.NDArray[np.float32]

FILE: Final = "predictions.json"
EXPECTED: Final = f"JPEG, PNG, WebP, TIFF or BMP of {MIN_PIXELS} to {MAX_PIXELS:,} pixels"
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
    drawings: int = 1000,
    force: bool = False,
    progress: Progress | None = None,
) -> Predicted:
    """Predict the pose in each readable picture, or in each box of it; write `predictions.json` and drawings.

    OpenCV decodes the pictures, once each and a few at a time, with the EXIF orientation applied: it reads more formats
    than training does. The views are planned and made as those of training on a CPU, without augmentation.

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
        progress: called with (pictures done, pictures in all).

    Raises:
        UserError: an argument cannot be used, or no picture can be read.
    """
    hands = _hands(images, box_px, boxes, out)
    validate(hands)
    there = [file.name for file in out.iterdir()] if out.is_dir() else []
    require_own_results(out, [FILE, *there], force=force)
    earlier = _earlier_drawings(out, there, force=force)
    loaded = load_pose_run(run, single_process().device)
    camera = None if intrinsics is None else read_intrinsics(intrinsics)
    done = Predicted(loaded.path, "reference_bone" if scale_m is None else "m", camera is None, [], [])
    files = [(file, list(rows)) for file, rows in itertools.groupby(range(len(hands)), hands.path)]
    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            for first in range(0, len(files), _AT_ONCE):
                group = files[first : first + _AT_ONCE]
                picture_of: dict[int, Image] = {}  # by row of the hands
                for (file, rows), picture in zip(group, pool.map(_usable_picture, group), strict=True):
                    if picture is None:
                        done.unreadable.append(file)
                    else:
                        picture_of |= dict.fromkeys(rows, picture)
                if picture_of:
                    shown = hands.select(np.array(list(picture_of)))
                    _add_predictions(done, out, drawings, loaded, pool, shown, [*picture_of.values()], camera, scale_m)
                if progress is not None:
                    progress(first + len(group), len(files))
    finally:  # also of a call that is stopped
        if done.predictions:
            write_predictions(out, done)
            given = {file.name for file, _ in files if file.parent == out.absolute()}
            for name in earlier - given - _drawings([vars(one) for one in done.predictions]):
                (out / name).unlink(missing_ok=True)
    if not done.predictions:
        raise UserError(f"none of {len(files)} pictures can be used, such as {files[0][0]}; expected {EXPECTED}")
    return done


def _hands(images: Sequence[str], box_px: Box | None, boxes: Path | None, out: Path) -> Index:
    """The hands of a file of boxes; or the pictures in the order given, each once, whole or a single one with a box."""
    if missing := [word for word in images if not word or not Path(word).exists()]:
        raise UserError(f"{missing[0]!r}: no picture and no folder of pictures. Check the path")
    if odd := [word for word in images if word != word.encode(errors="ignore").decode() and Path(word).is_dir()]:
        raise UserError(f"{odd[0]}: the name of this folder is not UTF-8; expected one that is. Rename it")
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
    return Index("pictures", Path("/"), list(map(str, files)), squares)


def _usable_picture(hands: tuple[Path, list[int]]) -> Image | None:
    picture = read_picture(hands[0])
    return None if picture is None or not MIN_PIXELS <= picture.size // 3 <= MAX_PIXELS else picture


def _add_predictions(
    done: Predicted,
    out: Path,
    drawings: int,
    run: PoseRun,
    pool: ThreadPoolExecutor,
    hands: Index,
    pictures: Sequence[Image],
    camera: Cameras | None,
    scale_m: float | None,
) -> None:
    """Make the canonical views of N hands in N pictures (H, W, 3), give them to the network, and draw its poses."""
    count, device, augmentation = len(pictures), single_process().device, canonical_view(run.config.geometry)
    sizes_px = np.array([picture.shape[:2] for picture in pictures], np.int64)
    box_px = (hands.box_px * [1, 1, run.box_margin]).astype(np.float32)  # of a whole picture, the side stays 0
    draws = draw_view(augmentation, seed=0, epoch=0, view=0, places=np.arange(count))
    upright, geometry = np.ones(count, np.int64), augmentation.geometry
    plan = plan_views(sizes_px, upright, box_px, [draws], [geometry], mirror=hands.mirrored)
    views = torch.empty(count, geometry.side_px, geometry.side_px, 3, dtype=torch.uint8)
    addresses = np.array([picture.ctypes.data for picture in pictures], np.int64)
    for share in start_views(pool, available_cores(), addresses, pictures, plan, [augmentation], [views]):
        share.result()

    cameras = np.array([assumed_intrinsics(*size) if camera is None else camera for size in sizes_px[:, ::-1].tolist()])
    to_view = torch.from_numpy(plan.source_to_view_px[0])
    of_view = view_intrinsics(torch.from_numpy(cameras), to_view)
    with inference(device):
        output = run.network(views.permute(0, 3, 1, 2).to(device), of_view.to(device))
    joints = output.joints.double().cpu().numpy()
    in_picture = from_view(output.keypoints_px.double().cpu(), to_view.double())
    require_finite(run.path, in_picture)
    keypoints_px = with_wrist(in_picture.numpy(), joints, cameras, run.config.pose)
    corners_px = torch.tensor([[0.0, 0.0], [geometry.side_px, geometry.side_px]], dtype=torch.float64)
    edges_px = np.sort(from_view(corners_px.expand(count, 2, 2), to_view.double()).numpy(), axis=1).reshape(count, 4)
    if not done.predictions:
        out.mkdir(parents=True, exist_ok=True)
        write_predictions(out, done)  # from it, a later call knows that the drawings are of this command
    for row in range(count):
        image, number, drawing = hands.path(row), len(done.predictions), None
        pose = joints[row] if run.depth else None
        if number < drawings:
            drawing = f"{number:04}_{image.stem[:60]}.jpg"
            view = (views[row].numpy(), to_view[row].numpy(), keypoints_px[row])
            save_sheet(out / drawing, prediction_pictures(pictures[row], edges_px[row], *view, pose), columns=3)
        one = Prediction(
            image=image,
            drawing=drawing,
            box_px=edges_px[row],
            mirrored=bool(hands.mirrored[row]),
            keypoints_px=keypoints_px[row],
            joints=None if pose is None else pose * (scale_m or 1.0),
            intrinsics=cameras[row].astype(np.float64),
        )
        done.predictions.append(one)


def read_intrinsics(file: Path) -> Cameras:
    """Read the camera matrix of a JSON file: [[fx, s, cx], [0, fy, cy], [0, 0, 1]], in pixels.

    Raises:
        UserError: the file has no camera matrix.
    """
    try:
        camera = as_numbers(parse_json(regular(file).read_bytes()))
    except ValueError:
        camera = None
    if (
        camera is None
        or camera.shape != (3, 3)
        or not (np.abs(camera) < 1e6).all()  # float32 can invert it
        or [*camera[2], camera[1, 0]] != [0, 0, 1, 0]
        or camera.diagonal()[:2].min() < LEAST_FOCAL_PX
    ):
        raise UserError(
            f"{file} holds no camera matrix in pixels: expected a single one for all pictures, [[fx, s, cx], "
            f"[0, fy, cy], [0, 0, 1]], with fx and fy of at least {LEAST_FOCAL_PX:g} pixels"
        )
    return camera.astype(np.float32)


def assumed_intrinsics(width_px: int, height_px: int) -> Cameras:
    """Camera matrix for an unknown camera: the focal length is the longer side, a field of view of 53 degrees."""
    focal_px = max(width_px, height_px)
    return np.array([[focal_px, 0, width_px / 2], [0, focal_px, height_px / 2], [0, 0, 1]], np.float32)


@dataclass(frozen=True)
class Prediction:
    """A pose in a picture.

    Attributes:
        image: absolute path of the picture.
        drawing: name of the drawing, beside `predictions.json`; None if it was not asked for.
        box_px: (4,) x0, y0, x1, y1 of the square that the network saw; it may extend beyond the picture.
        mirrored: whether the network saw the square mirrored, left for right, since it shows a left hand. The other
            values belong to the picture itself.
        keypoints_px: (K, 2) in pixels of the picture as displayed, corner-based.
        joints: (K, 3) in the camera's frame (x right, y down, z forward), in `Predicted.unit`; None if the network was
            trained without depths.
        intrinsics: (3, 3), as given or assumed.
    """

    image: Path
    drawing: str | None
    box_px: Floats
    mirrored: bool
    keypoints_px: Floats
    joints: Floats | None
    intrinsics: Floats


@dataclass(frozen=True)
class Predicted:
    """The results of one call.

    Attributes:
        unit: of the joints: "m", or "reference_bone": the length of the reference bone is 1.
        unreadable: pictures that could not be read.
    """

    checkpoint: Path
    unit: Literal["m", "reference_bone"]
    intrinsics_assumed: bool
    predictions: list[Prediction]
    unreadable: list[Path]


def write_predictions(folder: Path, predicted: Predicted) -> None:
    """Write `predictions.json`: a line for what all predictions share, and one for each of them."""

    def plain(value: object) -> object:
        return value.round(6).tolist() if isinstance(value, np.ndarray) else str(value)

    shared = {
        "checkpoint": str(predicted.checkpoint),
        "keypoints": HAND.keypoints,
        "unit": predicted.unit,
        "intrinsics_assumed": predicted.intrinsics_assumed,
    }
    lines = ",\n".join(json.dumps(vars(one), default=plain) for one in predicted.predictions)
    write_text(folder / FILE, f'{json.dumps(shared)[:-1]}, "predictions": [\n{lines}\n]}}\n')


def _earlier_drawings(folder: Path, there: Sequence[str], *, force: bool) -> set[str]:
    """The names of the drawings of an earlier call in a folder that holds these files.

    Raises:
        UserError: a file that is named like a drawing is none of them, and not `force`.
    """
    try:
        drawn = _drawings(read_predictions(folder))
    except UserError:  # there are no predictions, also after a call that was killed
        return set()
    others = [name for name in there if re.match(r"\d{4,}_", name) and name not in drawn]
    if others and not force:
        raise UserError(f"{folder / others[0]}: is none of the drawings there. Move it away, or give --force")
    return drawn


def _drawings(predictions: Sequence[Mapping[str, Any]]) -> set[str]:
    return {Path(one["drawing"]).name for one in predictions if isinstance(one["drawing"], str)}


def read_predictions(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The predictions in a folder of `predict`, at least one, each with the attributes of `Prediction`.

    Raises:
        UserError: there are none.
    """
    try:
        predictions: Sequence[Mapping[str, Any]] = parse_json(regular(folder / FILE).read_bytes())["predictions"]
        usable = bool(predictions) and all(one.keys() >= {*Prediction.__annotations__} for one in predictions)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise UserError(f"{folder} holds no predictions; expected a folder that predict wrote. Run predict first")
    return predictions

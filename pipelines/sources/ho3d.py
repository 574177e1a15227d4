"""HO-3D, versions 2 and 3: hands that hold objects, filmed by one to five cameras, with all keypoints in 3D.

Hampali et al., "HOnnotate: A method for 3D Annotation of Hand and Object Poses", CVPR 2020. The layout is that of the
authors' public scripts.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers
from peclr_dali.pipelines.arrays import BoolArray, DoubleArray
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.samples.index import Index, project_px, squares_around
from peclr_dali.pipelines.samples.subsets import HELD_OUT_FRAC, hash_of_name, refuse_key
from peclr_dali.pipelines.sources.boxes import with_one_box_each
from peclr_dali.pipelines.sources.folder import stored_images
from peclr_dali.pipelines.sources.label_files.dataset_file import Tables, dataset_file, read_json_array, remembered
from peclr_dali.pipelines.sources.label_files.pickles import MANO_TO_KEYPOINTS, read_numpy_pickle
from peclr_dali.skeleton import HAND

HAS_PARTS = True

OPENGL_TO_CAMERA = (1.0, -1.0, -1.0)
"""Signs that turn the annotations' axes (y up, negative z forward) into those of `Index` (y down, z forward)."""

log = logging.getLogger(__name__)


def load_ho3d(config: DataConfig) -> Index:
    """Read the frames of `train.txt` or `evaluation.txt`, in its order.

    `data.root` holds these lists, whose lines are SEQUENCE/FRAME, and `train/SEQUENCE/rgb/FRAME.png` (version 2) or
    `.jpg` (version 3) with `train/SEQUENCE/meta/FRAME.pkl`; `evaluation/` has the same layout. The pickles are read
    without running code, see `read_numpy_pickle`. All hands are right hands.

    Keypoints are camMat times handJoints3D, converted from OpenGL's axes and MANO's order to those of `Index`. Pixels
    are assumed to be corner-based, as for FreiHAND. The box is the square around the keypoints. The evaluation part has
    only the wrist and a box (handBoundingBox): the other keypoints are NaN, unless `data.root` has the
    `evaluation_xyz.json` that was published later.

    Listed frames whose image is missing, or whose annotation has no hand, are left out and counted in one warning. A
    group is a moment: the frames with the same number in all sequences of one recording. The names of these sequences
    differ only in the last of at least two digits, the camera. Splits divide the recordings. A file of boxes calls an
    image "train/ABF10/rgb/0000.png", and may have all listed frames.

    Returns:
        The index, with targets K, xyz_m and scale_m.

    Raises:
        UserError: a file is missing or does not fit the layout, a pickle contains more than arrays, or there is no
            frame.
    """
    root, part, split, boxes = Path(config.root), config.part, config.split, box_file(config)
    if part == "evaluation":
        refuse_key(config, "split", "HO-3D's evaluation frames are not split")
    folder = "train" if part == "training" else "evaluation"
    frames = _listed_frames(root, folder)
    # Before the split: evaluation_xyz.json has no names, so its entries are matched by position.
    chosen = np.arange(len(frames)) if split == "all" else np.flatnonzero(_in_split(root, frames, split))
    stems = [f"{folder}/{sequence}/rgb/{frame}" for sequence, frame in frames]
    stored = stored_images(root, stems)
    places = np.array([place for place in chosen.tolist() if stored[place] is not None], np.int64)
    tables = _annotations(root, folder, [frames[place] for place in places.tolist()])
    xyz_m, label_file = tables["xyz_m"], root / folder / "*/meta"
    if part == "evaluation" and (root / "evaluation_xyz.json").is_file():
        label_file = root / "evaluation_xyz.json"
        joints = read_json_array(label_file, (len(HAND), 3))
        if len(joints) != len(frames):
            raise UserError(
                f"{label_file}: keypoints of {len(joints)} frames, but evaluation.txt lists {len(frames)}. Use both of "
                "one version."
            )
        xyz_m = _in_our_frame(joints[places])
        if apart := np.count_nonzero(np.linalg.norm(xyz_m[:, 0] - tables["xyz_m"][:, 0], axis=1) > 0.002):
            log.warning(
                "%s: %d of %d wrists are elsewhere than in %s/*/meta. Is evaluation.txt in another order? Unpack the "
                "dataset again",
                *(label_file, apart, len(places), root / folder),
            )
    keypoints_px = project_px(tables["K"], xyz_m)
    # The annotated box counts where a keypoint is not known.
    whole = np.isfinite(keypoints_px).reshape(len(places), -1).all(axis=1, keepdims=True)
    low_px = np.where(whole, keypoints_px.min(axis=1), tables["box_px"][:, :2])
    high_px = np.where(whole, keypoints_px.max(axis=1), tables["box_px"][:, 2:])
    usable = np.flatnonzero((high_px > low_px).all(axis=1) & np.isfinite(low_px + high_px).all(axis=1))
    if len(usable) < len(chosen):
        log.warning(
            "%s: %d of %d listed frames are used; the images of %d are missing, and the annotations of %d have no hand",
            root / f"{folder}.txt", len(usable), len(chosen), len(chosen) - len(places), len(places) - len(usable),
        )  # fmt: skip
    places, xyz_m = places[usable], xyz_m[usable]
    ending = Path(next(filter(None, stored))).suffix  # that of the missing ones, too
    names = [path or stem + ending for path, stem in zip(stored, stems, strict=True)]
    moments = [f"{_recording(sequence)}/{frame}" for sequence, frame in (frames[place] for place in places.tolist())]
    index = Index(
        name=f"ho3d {part}",
        root=root,
        paths=[names[place] for place in places.tolist()],
        box_px=squares_around(low_px[usable], high_px[usable]),
        keypoints_px=keypoints_px[usable].astype(np.float32),
        group=np.array([hash_of_name(moment) for moment in moments], np.int64),
        targets={
            "K": tables["K"][usable].astype(np.float32),
            "xyz_m": xyz_m.astype(np.float32),
            "scale_m": np.linalg.norm(xyz_m[:, 10] - xyz_m[:, 9], axis=1).astype(np.float32),
        },
        label_file=str(label_file),
        one_size=True,
    )
    return index if boxes is None else with_one_box_each(index, boxes, names, places)


def _listed_frames(root: Path, folder: str) -> list[tuple[str, str]]:
    expected = "HO-3D's frames, a line SEQUENCE/FRAME for each, such as ABF10/0000"
    with dataset_file(root / f"{folder}.txt", expected, "Check data.root, or unpack the dataset again.") as path:
        lines = path.read_text(encoding="utf-8-sig").split()
        if len({*lines}) < max(1, len(lines)):
            raise ValueError("empty, or a line twice")
        for number, line in enumerate(lines, start=1):
            if not re.fullmatch(r"[\w-]+/[\w-]+", line):
                raise ValueError(f"line {number}: {line[:80]!r}")
    return [(sequence, frame) for sequence, _, frame in (line.partition("/") for line in lines)]


def _recording(sequence: str) -> str:
    """Name of a sequence's recording: without the last of at least two digits, which is the camera."""
    return sequence[:-1] if re.search(r"\d\d$", sequence) else sequence


def _in_split(root: Path, frames: Sequence[tuple[str, str]], split: str) -> BoolArray:
    """Mask of the frames of a split. The recordings with the smallest hashes are the validation set."""
    of_frame = [_recording(sequence) for sequence, _ in frames]
    recordings = sorted(set(of_frame), key=hash_of_name)
    if len(recordings) < 2:
        raise UserError(f"{root}: one recording, {recordings[0]!r}, cannot be split. Use split 'all', or a larger set.")
    held_out = set(recordings[: max(1, round(HELD_OUT_FRAC * len(recordings)))])
    return np.array([(recording in held_out) == (split == "val") for recording in of_frame], bool)


def _annotations(root: Path, folder: str, frames: Sequence[tuple[str, str]]) -> Tables:
    """Annotations of the frames: K (N, 3, 3), xyz_m (N, 21, 3), box_px (N, 4) x0, y0, x1, y1; NaN if missing."""
    metas = [root / folder / sequence / "meta" for sequence in sorted({sequence for sequence, _ in frames})]
    selection = hashlib.blake2b(repr(frames).encode(), digest_size=8).hexdigest()

    def read() -> Tables:
        log.info("%s/*/meta is read; this takes about a minute, once", root / folder)
        cameras, xyz_m, boxes_px = [], np.full((len(frames), len(HAND), 3), np.nan), []
        for row, (sequence, frame) in enumerate(frames):
            file = root / folder / sequence / "meta" / f"{frame}.pkl"
            content = read_numpy_pickle(file)
            joints = _numbers(file, content, "handJoints3D", [(len(HAND), 3), (3,)])
            cameras.append(_numbers(file, content, "camMat", [(3, 3)]))
            boxes_px.append(_numbers(file, content, "handBoundingBox", [(4,)]))
            if joints.ndim == 2:
                xyz_m[row] = _in_our_frame(joints)
            else:
                xyz_m[row, 0] = joints * OPENGL_TO_CAMERA
        return {"K": np.array(cameras), "xyz_m": xyz_m, "box_px": np.array(boxes_px)}

    return remembered(f"ho3d-1-{selection}", metas, read)


def _in_our_frame(joints: DoubleArray) -> DoubleArray:
    """Convert keypoints (..., 21, 3) of HO-3D to the axes and the order of `Index`."""
    return np.asarray(joints[..., MANO_TO_KEYPOINTS, :] * OPENGL_TO_CAMERA)


def _numbers(file: Path, content: dict[str, Any], key: str, shapes: Sequence[tuple[int, ...]]) -> DoubleArray:
    """Read an array of an annotation; NaN of the last shape if it is missing."""
    value = content.get(key)
    if value is None:
        return np.full(shapes[-1], np.nan)
    array = as_numbers(value)
    if array is None or array.shape not in shapes or not np.isfinite(array).all():
        found = "no numbers" if array is None else " x ".join(map(str, array.shape)) or "a single number"
        expected = " or ".join(" x ".join(map(str, shape)) for shape in shapes)
        raise UserError(f"{file}: {key} is {found}; expected {expected} finite numbers. Unpack the dataset again.")
    return array

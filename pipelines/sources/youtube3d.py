"""YouTube3DHands: 50,175 hands in frames of 109 videos, each with a mesh of 778 vertices aligned with the picture.

Kulon et al., "Weakly-Supervised Mesh-Convolutional Hand Reconstruction in the Wild", CVPR 2020. The layout is that of
the dataset's public loader and of its script that fetches the frames.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import as_numbers, file_name
from pipelines.config import DataConfig
from pipelines.samples.image_sizes import read_upright_size_px
from pipelines.samples.index import Index, read_file
from pipelines.sources.annotations.cache import Tables, remembered
from pipelines.sources.annotations.json_stream import elements
from pipelines.sources.annotations.mano import VERTICES, keypoint_regressor, read_regressor
from pipelines.sources.annotations.stored_images import first_stored
from pipelines.sources.boxes import refuse_boxes, squares_around

_ENDINGS: Final = (".png", ".jpg", ".jpeg")
_MOST_PX: Final = 2**31
_SAME_SHAPE: Final = 0.01
"""Largest relative difference of aspect ratios that count as equal, as those of 854 x 480 and 1280 x 720."""

log = logging.getLogger(__name__)


def load_youtube3d(config: DataConfig) -> Index:
    """Read the hands of one part (train, val or test) whose frames exist.

    `data.root` holds `youtube_PART.json` and the frames, `youtube/VIDEO/video/frames/FRAME.png`; frames may also
    be .jpg or .jpeg. A frame may show several hands; each is a row. Frames that are missing (videos go offline) are
    left out and counted in one warning. Rows keep the order of the annotations; a frame is a group.

    The box is the square around the mesh's vertices. Left hands are mirrored. If a video has another resolution than in
    its annotation, boxes and keypoints are scaled; the resolution is read from its first frame.

    The vertices' x and y are pixels of the annotated frame, as the dataset's loader draws them. It is not documented
    whether they count from the first pixel's corner or its centre; the corner is assumed. Their z is a depth in the
    same unit (weak perspective), so there are neither cameras nor metres.

    Returns:
        The index. With `data.regressor` (see `read_regressor`) it has keypoints and the target xyz_px (N, 21, 3),
        keypoints with their depth in pixels: a pose up to scale and shift, which is enough for Procrustes-aligned
        metrics.

    Raises:
        UserError: a file is missing or does not fit the layout, or no frame exists.
    """
    refuse_boxes(config, "YouTube3DHands has its own boxes, one for each hand of a frame")
    root, part = Path(config.root), _part(config)
    regressor = None if config.regressor is None else Path(config.regressor)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected youtube_{part}.json and youtube/ in it. Check data.root.")
    annotations = root / f"youtube_{part}.json"
    if not annotations.is_file():
        raise UserError(
            f"{annotations}: no such file; expected YouTube3DHands' annotations there. Check data.root, or ask its "
            "authors for the dataset."
        )
    files = [annotations] if regressor is None else [annotations, regressor]
    matrix = None if regressor is None else keypoint_regressor(read_regressor(regressor))
    hands = remembered("youtube3d-1", files, lambda: _read_hands(annotations, matrix))
    return _index(root, part, hands)


def _part(config: DataConfig) -> str:
    if config.part == "training":
        return "val" if config.split == "val" else "train"
    if config.split != "all":
        raise UserError(f'data.split = {config.split!r}: YouTube3DHands\' test part is not split. Use "all".')
    return "test"


def _index(root: Path, part: str, hands: Tables) -> Index:
    names: list[str] = hands["names"].tolist()
    stored = first_stored(root, map(_possible_names, names))
    there = np.array([stored[image] is not None for image in hands["image"].tolist()], bool)
    count = len(there)
    if not there.any():
        raise UserError(
            f"{root}: no frame of {count} hands exists; the first would be {names[hands['image'][0]]} (or .jpg); "
            "fetch the videos' frames, or check data.root."
        )
    scale = _scales(root, names, stored, hands["size_px"])[hands["image"]]  # (N, 2), NaN where it does not fit
    fits = np.isfinite(scale[:, 0])
    kept = np.flatnonzero(there & fits)
    if not len(kept):
        raise UserError(f"{root}: every frame has another aspect ratio than its annotation; fetch the original videos.")
    scale = scale[kept]
    if len(kept) < count or (scale != 1).any():
        log.warning(
            "%s: %d of %d hands are used. Left out are %d without a frame, and %d whose frame has another aspect ratio "
            "than its annotation. For %d, whose frame has another size, boxes and keypoints were scaled",
            root / f"youtube_{part}.json",
            len(kept),
            count,
            (~there).sum(),
            (there & ~fits).sum(),
            (scale != 1).any(axis=1).sum(),
        )
    low_px, high_px = hands["low_px"][kept] * scale, hands["high_px"][kept] * scale
    keypoints_px, targets = None, {}
    if "xyz_px" in hands:
        xyz_px = hands["xyz_px"][kept] * np.column_stack([scale, scale.mean(axis=1)])[:, None, :]
        keypoints_px, targets = xyz_px[..., :2].astype(np.float32), {"xyz_px": xyz_px.astype(np.float32)}
    images = hands["image"][kept]
    return Index(
        name=f"youtube3d {part}",
        root=root,
        paths=[str(stored[image]) for image in images.tolist()],
        box_px=squares_around(low_px, high_px),
        keypoints_px=keypoints_px,
        mirror=hands["is_left"][kept],
        group=images,
        targets=targets,
    )


def _read_hands(file: Path, regressor: npt.NDArray[np.float64] | None) -> Tables:
    """Read the annotations of a file, without the meshes.

    Returns:
        Per image: names (M,), size_px (M, 2) width and height. Per hand: image (N,) its row among the images, is_left
        (N,), low_px and high_px (N, 2) of the vertices, and with a regressor xyz_px (N, 21, 3).
    """
    names: list[str] = []
    sizes_px: list[tuple[int, int]] = []
    row_of: dict[Any, int] = {}
    image_ids: list[int] = []
    is_left: list[bool] = []
    low_px, high_px, xyz_px = [], [], []
    seen = set()
    for key, entry in elements(file):
        seen.add(key)
        if key == "images":
            where = f"image {len(names)}"
            row_of[_field(file, where, entry, "id", int)] = len(names)
            names.append(_safe_name(file, where, _field(file, where, entry, "name", str)))
            width, height = (_field(file, where, entry, side, int) for side in ("width", "height"))
            size = f"{width} x {height}"
            if not 0 < min(width, height) <= max(width, height) <= _MOST_PX:
                raise UserError(f"{file}, {where}: its size is {size[:40]}; expected pixels. Unpack the dataset again.")
            sizes_px.append((width, height))
        elif key == "annotations":
            where = f"annotation {len(image_ids)}"
            vertices = _vertices(file, where, entry)
            image_ids.append(_field(file, where, entry, "image_id", int))
            is_left.append(bool(_field(file, where, entry, "is_left", int)))
            low_px.append(vertices[:, :2].min(axis=0))
            high_px.append(vertices[:, :2].max(axis=0))
            if regressor is not None:
                xyz_px.append(regressor @ vertices)
    if not names or not image_ids:
        raise UserError(
            f"{file}: {len(names)} images and {len(image_ids)} annotations; expected the lists 'images' and "
            f"'annotations' with something in them{'' if seen else ', found neither'}. Unpack the dataset again."
        )
    for number, image_id in enumerate(image_ids):
        if image_id not in row_of:
            raise UserError(
                f"{file}, annotation {number}: none of the {len(names)} images has the id {image_id}. "
                "Use images and annotations of one file, as published."
            )
    tables: Tables = {
        "names": np.array(names),
        "size_px": np.array(sizes_px),
        "image": np.array([row_of[image_id] for image_id in image_ids]),
        "is_left": np.array(is_left),
        "low_px": np.array(low_px),
        "high_px": np.array(high_px),
    }
    if regressor is not None:
        tables["xyz_px"] = np.array(xyz_px)
    return tables


def _field(file: Path, where: str, entry: Any, key: str, kind: type) -> Any:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        found = f"{key!r} is {value!r}" if isinstance(entry, dict) and key in entry else f"no {key!r}"
        raise UserError(
            f"{file}, {where}: {found[:80]}; expected {'text' if kind is str else 'a whole number'}. "
            "Unpack the dataset again."
        )
    return value


def _safe_name(file: Path, where: str, name: str) -> str:
    path = PurePosixPath(name)
    with suppress(ValueError):
        if not path.is_absolute() and ".." not in path.parts and path.suffix.lower() in _ENDINGS:
            return file_name(name)
    raise UserError(
        f"{file}, {where}: the name {name[:80]!r}; expected one like youtube/VIDEO/video/frames/FRAME.png. "
        "Unpack the dataset again."
    )


def _vertices(file: Path, where: str, entry: Any) -> npt.NDArray[np.float64]:
    """Vertices (778, 3) of an annotation, checked."""
    content = entry.get("vertices") if isinstance(entry, dict) else None
    vertices = as_numbers(content)
    if vertices is None or vertices.shape != (VERTICES, 3) or not np.isfinite(vertices).all():
        found = " x ".join(map(str, vertices.shape)) if vertices is not None and vertices.size > 1 else "none"
        raise UserError(
            f"{file}, {where}: its vertices are {found}; expected {VERTICES} x 3 finite numbers. "
            "Unpack the dataset again."
        )
    return vertices


def _possible_names(name: str) -> list[str]:
    """A frame's name with each possible ending."""
    stem, _, ending = name.rpartition(".")
    return [name, *(stem + other for other in _ENDINGS if other != f".{ending}")]


def _scales(
    root: Path, names: Sequence[str], stored: Sequence[str | None], size_px: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(M, 2) ratios of each frame's stored size to its annotated size, along x and y; NaN if the aspect ratio differs.

    Only the first readable frame of each video is read.
    """
    of_video: dict[tuple[str, int, int], npt.NDArray[np.float64]] = {}
    scales = np.ones((len(names), 2))
    for row, path in enumerate(stored):
        if path is None:
            continue
        video = (path.rpartition("/")[0], *size_px[row].tolist())
        if video not in of_video:
            stored_px = read_upright_size_px(partial(read_file, str(root / path)))
            if stored_px is None:  # the loader reports it later
                continue
            scale = np.array(stored_px[::-1]) / size_px[row]
            of_video[video] = scale if abs(scale[0] / scale[1] - 1) <= _SAME_SHAPE else np.full(2, np.nan)
        scales[row] = of_video[video]
    return scales

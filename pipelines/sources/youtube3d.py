"""YouTube3DHands: 50,175 hands in frames of 109 videos, each with a mesh of 778 vertices aligned with the picture.

Kulon et al., "Weakly-Supervised Mesh-Convolutional Hand Reconstruction in the Wild", CVPR 2020. The layout is that of
the dataset's public loader and of its script that fetches the frames.
"""

import logging
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ijson
import numpy as np

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.parsing import as_numbers, file_name
from peclr_dali.pipelines.arrays import DoubleArray, IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.samples.index import Index, read_or_error, squares_around
from peclr_dali.pipelines.samples.subsets import refuse_key
from peclr_dali.pipelines.sources.folder import ENDINGS, stored_images
from peclr_dali.pipelines.sources.label_files.dataset_file import Entries, Tables, dataset_file, remembered
from peclr_dali.pipelines.sources.label_files.pickles import VERTICES, read_regressor

HAS_PARTS = True

T = TypeVar("T")

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
    refuse_key(config, "box", "YouTube3DHands has its own boxes, one for each hand of a frame")
    root, part = Path(config.root), "val" if config.split == "val" else "train"
    if config.part == "evaluation":
        refuse_key(config, "split", "YouTube3DHands' test images are not split")
        part = "test"
    annotations = root / f"youtube_{part}.json"
    files, regressor = [annotations], None
    if config.regressor is not None:
        files.append(Path(config.regressor))
        regressor = read_regressor(files[1])
    hands = remembered("youtube3d-1", files, lambda: _read_hands(annotations, regressor))
    names: list[str] = hands["names"].tolist()
    stored = stored_images(root, [name.rpartition(".")[0] for name in names])
    there = np.array([stored[image] is not None for image in hands["image"].tolist()], bool)
    scale = _scales(root, names, stored, hands["size_px"])[hands["image"]]  # (N, 2), NaN where it does not fit
    fits = np.isfinite(scale[:, 0])
    kept = np.flatnonzero(there & fits)
    scale = scale[kept]
    missing, misfits, scaled = (~there).sum(), (there & ~fits).sum(), (scale != 1).any(axis=1).sum()
    if missing or misfits or scaled:
        log.warning(
            "%s: %d of %d hands are used. Left out are %d without a frame, and %d whose frame has another aspect ratio "
            "than its annotation. For %d, whose frame has another size, boxes and keypoints were scaled",
            annotations, len(kept), len(there), missing, misfits, scaled,
        )  # fmt: skip
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
        label_file=str(annotations),
    )


def _frame(entry: dict[str, Any]) -> tuple[int, str, tuple[int, int]]:
    """The id, name, and width and height of an entry of the file's list "images"."""
    size_px = entry["width"], entry["height"]
    if not all(isinstance(side, int) and 0 < side <= 2**31 for side in size_px):
        raise ValueError(f"width and height are {size_px}, expected whole numbers above 0")
    name = entry["name"]
    parts = file_name(name).split("/")  # by hand: PurePosixPath took a tenth of all time
    if not parts[0] or ".." in parts or not parts[-1].endswith(ENDINGS):
        raise ValueError(f"{name[:80]!r} is no name like VIDEO/FRAME.png or VIDEO/FRAME.jpg, relative to data.root")
    return int(entry["id"]), name, size_px


def _hand(entry: dict[str, Any]) -> tuple[int, bool, DoubleArray]:
    """The image's id, whether it is a left hand, and vertices (778, 3) in pixels of an entry of "annotations"."""
    mesh = as_numbers(entry["vertices"])
    if mesh is None or mesh.shape != (VERTICES, 3) or not np.isfinite(mesh).all():
        found = "none" if mesh is None else " x ".join(map(str, mesh.shape))
        raise ValueError(f"vertices: found {found}, expected {VERTICES} x 3 finite numbers")
    if entry["is_left"] not in (0, 1):
        raise ValueError(f"is_left is {str(entry['is_left'])[:80]!r}, expected 0 or 1")
    return int(entry["image_id"]), bool(entry["is_left"]), mesh


def _entries(content: BinaryIO, file: Path, kind: str, read: Callable[[dict[str, Any]], T]) -> Iterator[tuple[str, T]]:
    """The place of each entry of a list of the file, for messages, and what `read` makes of it."""
    content.seek(0)
    if content.read(len(BOM_UTF8)) != BOM_UTF8:
        content.seek(0)
    for number, entry in enumerate(ijson.items(content, f"{kind}s.item", use_float=True)):
        place = f"{file}, {kind} {number}"
        try:
            yield place, read(entry)
        except (LookupError, TypeError, ValueError) as error:
            reason = repr(error)[:200] if isinstance(error, LookupError) else in_one_line(error)
            raise UserError(f"{place}: {reason}. Unpack the dataset again.") from error


def _read_hands(file: Path, regressor: DoubleArray | None) -> Tables:
    """Read the annotations of a file, without the meshes.

    Returns:
        Per image: names (M,), size_px (M, 2) width and height. Per hand: image (N,) its row among the images, is_left
        (N,), low_px and high_px (N, 2) of the vertices, and with a regressor xyz_px (N, 21, 3).
    """
    log.info("%s is read; this takes about a minute, once", file)
    rows, is_left, low_px, high_px, xyz_px = list[int](), list[bool](), [], [], []
    expected = "the dataset's annotations, a JSON object with the lists 'images' and 'annotations'"
    remedy = "Check data.root, or unpack the dataset again."
    with dataset_file(file, expected, remedy) as path, path.open("rb") as content:  # two GB: never whole in memory
        images = [image for _, image in _entries(content, file, "image", _frame)]
        listed = Entries([number for number, *_ in images], file, "images")
        for place, (image, left, mesh) in _entries(content, file, "annotation", _hand):
            rows.append(listed.row(image, place))
            is_left.append(left)
            low_px.append(mesh[:, :2].min(axis=0))
            high_px.append(mesh[:, :2].max(axis=0))
            if regressor is not None:
                xyz_px.append(regressor @ mesh)
        if not rows:
            raise ValueError(f"{len(images)} images and 0 annotations")
    tables: Tables = {
        "names": np.array([name for _, name, _ in images]),
        "size_px": np.array([size_px for *_, size_px in images]),
        "image": np.array(rows, np.int64),
        "is_left": np.array(is_left),
        "low_px": np.array(low_px),
        "high_px": np.array(high_px),
    }
    return tables if regressor is None else {**tables, "xyz_px": np.array(xyz_px)}


def _scales(root: Path, names: Sequence[str], stored: Sequence[str | None], size_px: IntArray) -> DoubleArray:
    """(M, 2) ratios of each frame's stored size to its annotated size, along x and y; NaN if the aspect ratio differs.

    Only the first readable frame of each video is read.
    """
    of_video: dict[tuple[str, int, int], DoubleArray] = {}
    scales = np.ones((len(names), 2))
    for row, path in enumerate(stored):
        if path is None:
            continue
        video = (path.rpartition("/")[0], *size_px[row].tolist())
        if video not in of_video:
            stored_px = image_sizes_px([read_or_error(str(root / path))])[0]
            if not stored_px.all():  # the loader reports it later
                continue
            scale = stored_px[::-1] / size_px[row]
            # 854 x 480 and 1280 x 720 count as one shape.
            of_video[video] = scale if abs(scale[0] / scale[1] - 1) <= 0.01 else np.full(2, np.nan)
        scales[row] = of_video[video]
    return scales

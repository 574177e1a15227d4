"""Dexter+Object: 3,014 frames of a hand that moves a cuboid, with the visible fingertips in 3D; for evaluation.

Sridhar et al., "Real-time Joint Tracking of a Hand Manipulating an Object from RGB-D Input", ECCV 2016.

The layout and the numbers below come from two public loaders, which agree on them, since the dataset was not available.
Four assumptions are not verified: the order of the colour frames' names is the order of the annotations' lines; all
hands are left hands, as in one of the loaders; x and y of the annotations point left and up, as in that loader (the
other adds constants that it calls strange); pixels count from the first pixel's corner. According to the authors of
both loaders, some annotations are wrong.
"""

import logging
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.samples.index import Index, project_px, squares_around
from peclr_dali.pipelines.samples.subsets import refuse_key
from peclr_dali.pipelines.sources.boxes import with_one_box_each
from peclr_dali.pipelines.sources.folder import ENDINGS, files_under
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file
from peclr_dali.skeleton import FINGERS, HAND

SEQUENCES = ("Grasp1", "Grasp2", "Occlusion", "Pinch", "Rigid", "Rotate")
TIPS = [HAND.keypoints.index(f"{finger}_tip") for finger in FINGERS]
"""Rows in `HAND.keypoints` of a line's first points: the fingertips from thumb to little finger. Then come the object's
corners."""

# Camera matrix of the colour camera, in pixels of its 640 x 480 frames.
_COLOUR_K = np.array([[587.45209, 0, 325], [0, 600.67456, 249], [0, 0, 1]])

# Maps the depth camera's frame, which the annotations use, to the colour camera's.
_DEPTH_TO_COLOUR_MM = np.array(
    [[0.9999, 0.0034, 0.0161, 19.0473], [-0.0033, 1.0, -0.0079, -1.8514], [-0.0162, 0.0079, 0.9998, -4.7501]]
)

# Smallest side of a box, in metres at the depth of the fingertips: a box around few fingertips would miss the hand.
_LEAST_BOX_M = 0.12

log = logging.getLogger(__name__)


def load_dexter_object(config: DataConfig) -> Index:
    """Read all frames with an annotated fingertip, sequence by sequence.

    `data.root` holds `data/SEQUENCE/color/`, whose n-th file in the order of names belongs to the n-th line of
    `data/SEQUENCE/annotations/SEQUENCE3D.txt`. A line is `x, y, z; x, y, z; ...` in millimetres.

    Only visible fingertips are annotated. All other keypoints are NaN in `keypoints_px` and `xyz_m`. The box is the
    square around the fingertips, or of side 0.12 m at their depth if that is larger. All samples are left hands
    and mirrored. Frames without an annotated fingertip are left out and counted in one warning. A file of boxes calls
    an image "data/Grasp1/color/NAME.png", and may have all frames.

    Returns:
        The index, with targets K and xyz_m, in the colour camera's frame.

    Raises:
        UserError: a folder or file is missing or does not fit the layout.
    """
    refuse_key(config, "split", "the frames of Dexter+Object are not split")
    root, boxes = Path(config.root), box_file(config)
    data = root / "data"
    present = [sequence for sequence in SEQUENCES if (data / sequence).is_dir()]
    if not present:
        raise UserError(f"{data}: none of the folders {', '.join(SEQUENCES)} is there; expected one. Check data.root.")
    paths, tips = list[str](), []
    for sequence in present:
        tips.append(_tips_mm(data / sequence / "annotations" / f"{sequence}3D.txt"))
        frames, others = files_under(data / sequence / "color", ENDINGS)
        if len(tips[-1]) != len(frames):
            raise UserError(
                f"{data / sequence}: {len(frames)} {', '.join(ENDINGS)} files and {sum(others.values())} others in "
                f"color, but {len(tips[-1])} lines in annotations/{sequence}3D.txt; expected one for each frame. "
                "Unpack the dataset again; convert frames of other kinds to PNG, under the same names."
            )
        frames.sort(key=lambda name: (len(name), name))  # image_10 after image_9
        paths += [f"data/{sequence}/color/{frame}" for frame in frames]
    tips_mm = np.concatenate(tips) * [-1, -1, 1]  # (N, 5, 3), x right, y down, z forward
    tips_m = (tips_mm @ _DEPTH_TO_COLOUR_MM[:, :3].T + _DEPTH_TO_COLOUR_MM[:, 3]) / 1000
    kept = np.flatnonzero(np.isfinite(tips_m[..., 2]).any(axis=1))
    if len(kept) < len(paths) or len(present) < len(SEQUENCES):
        used = f"{len(kept)} of {len(paths)} frames are used, of {len(present)} of {len(SEQUENCES)} sequences"
        log.warning("%s: %s; the other frames have no annotated fingertip", data, used)
    xyz_m = np.full((len(kept), len(HAND), 3), np.nan)
    xyz_m[:, TIPS] = tips_m[kept]
    keypoints_px = project_px(_COLOUR_K, xyz_m)
    box_px = squares_around(np.fmin.reduce(keypoints_px, axis=1), np.fmax.reduce(keypoints_px, axis=1))
    box_px[:, 2] = np.maximum(box_px[:, 2], _LEAST_BOX_M * _COLOUR_K[0, 0] / np.nanmean(xyz_m[..., 2], axis=1))
    index = Index(
        name="dexter_object",
        root=root,
        paths=[paths[row] for row in kept.tolist()],
        box_px=box_px,
        keypoints_px=keypoints_px.astype(np.float32),
        mirror=np.ones(len(kept), bool),
        targets={"K": np.tile(_COLOUR_K.astype(np.float32), (len(kept), 1, 1)), "xyz_m": xyz_m.astype(np.float32)},
        label_file=f"{data}/*/annotations",
        one_size=True,
    )
    return index if boxes is None else with_one_box_each(index, boxes, paths, kept)


def _tips_mm(file: Path) -> DoubleArray:
    """The annotated fingertips (N, 5, 3); NaN where there is none."""
    tips_mm = []
    with dataset_file(file, f"a line 'x, y, z; ...' of {len(TIPS)} fingertips or more for each frame") as path:
        lines = filter(str.strip, path.read_text(encoding="utf-8-sig").splitlines())
        for number, line in enumerate(lines, start=1):
            points = as_numbers([point.split(",") for point in line.split(";") if point.strip()])
            if points is None or points.shape[1:] != (3,) or len(points) < len(TIPS) or not np.isfinite(points).all():
                raise ValueError(f"line {number}: {line.strip()[:60]!r}")
            tips_mm.append(points[: len(TIPS)])
    tips = np.array(tips_mm).reshape(-1, len(TIPS), 3)
    tips[(tips[..., 2] == 32001) | (tips[..., 2] <= 0)] = np.nan  # the depth camera's values for no measurement
    return tips

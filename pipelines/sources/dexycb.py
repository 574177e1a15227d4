"""DexYCB: 582,000 frames of ten people who grasp objects, filmed by eight cameras, with all keypoints in 3D.

Chao et al., "DexYCB: A Benchmark for Capturing Hand Grasping of Objects", CVPR 2021. Layout and splits are those of the
authors' public toolkit.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index, squares_around
from peclr_dali.pipelines.samples.subsets import hash_of_name, refuse_key
from peclr_dali.pipelines.sources.folder import stored_images
from peclr_dali.pipelines.sources.label_files.dataset_file import Tables, dataset_file, remembered
from peclr_dali.skeleton import HAND

HAS_PARTS = True

CAMERAS = (
    "836212060125", "839512060362", "840412060917", "841412060263",
    "932122060857", "932122060861", "932122061900", "932122062010",
)  # fmt: skip
"""Serial numbers of the cameras, in the toolkit's order."""

log = logging.getLogger(__name__)


def load_dexycb(config: DataConfig) -> Index:
    """Read the frames of the chosen films, which are a camera's frames of a sequence, in the order of their names.

    `data.root` holds `SUBJECT/SEQUENCE/meta.yml`, `SUBJECT/SEQUENCE/CAMERA/color_%06d.jpg` with `labels_%06d.npz`, and
    `calibration/intrinsics/CAMERA_640x480.yml`. Some of the subjects suffice. Parts and splits are the toolkit's of
    `data.setup`; `data.split = "all"` is train and val.

    The cameras count pixels from the first pixel's centre, so half a pixel is added to `joint_2d` and to the centres of
    the cameras. The box is the square around the keypoints. Left hands are mirrored. Frames whose image is missing, and
    those without a hand, whose labels are -1, are left out and counted in one warning. A group is a moment: the frames
    of all cameras with the same number.

    Returns:
        The index, with targets K and xyz_m.

    Raises:
        UserError: a file is missing or does not fit the layout, a subject lacks sequences, or there is no frame.
    """
    refuse_key(config, "box", "the boxes of DexYCB are around its keypoints")
    root, chosen = Path(config.root), {"all": ["train", "val"]}.get(config.split, [config.split])
    if config.part == "evaluation":
        refuse_key(config, "split", "DexYCB's test frames are not split")
        chosen = ["test"]
    films = [(sequence, camera) for sequence, camera, split in _films(root, config.setup) if split in chosen]
    if not films:
        raise UserError(
            f"{root}: no sequence of {' or '.join(chosen)} of data.setup = {config.setup!r}; expected some as in "
            "20200709-subject-01/20200709_141754. Check data.root, or unpack other subjects."
        )
    files = {sequence: root / sequence / "meta.yml" for sequence, _ in films}
    metas = {sequence: _meta(file) for sequence, file in files.items()}
    stems = [
        f"{sequence}/{camera}/color_{frame:06d}" for sequence, camera in films for frame in range(metas[sequence][0])
    ]
    paths = [path for path in stored_images(root, stems) if path is not None]
    name = f"dexycb-1-{hash_of_name(' '.join(paths)):x}"
    labels = remembered(name, [*files.values()], lambda: _labels(root, paths))
    shown = np.flatnonzero((labels["xyz_m"] != -1).any(axis=(1, 2)))
    if len(shown) < len(stems):
        log.warning(
            "%s: %d of %d frames are used; the images of %d are missing, and %d show no hand",
            root, len(shown), len(stems), len(stems) - len(paths), len(paths) - len(shown),
        )  # fmt: skip
    places = [paths[row].rsplit("/", 2) for row in shown.tolist()]  # sequence, camera, image
    keypoints_px = labels["joints_px"][shown] + np.float32(0.5)
    cameras = np.array([_camera(root / "calibration" / "intrinsics" / f"{name}_640x480.yml") for name in CAMERAS])
    return Index(
        name=f"dexycb {config.setup} {' and '.join(chosen)}",
        root=root,
        paths=["/".join(place) for place in places],
        box_px=squares_around(keypoints_px.min(axis=1), keypoints_px.max(axis=1)),
        keypoints_px=keypoints_px,
        mirror=np.array([metas[sequence][1] for sequence, _, _ in places], bool),
        group=np.array([hash_of_name(f"{sequence}/{image}") for sequence, _, image in places], np.int64),
        targets={"K": cameras[[CAMERAS.index(camera) for _, camera, _ in places]], "xyz_m": labels["xyz_m"][shown]},
        label_file=f"{root}/*/*/*/labels_*.npz",
        one_size=True,
    )


def split_of(setup: str, subject: int, camera: int, sequence: int) -> str:
    """The split of a film in a setup of the toolkit: "train", "val" or "test". All numbers count from 0.

    A setup holds out what its test shows: sequences of known people, cameras and objects ("s0"), people ("s1"), cameras
    ("s2"), or grasped objects ("s3"), one in each five sequences that follow each other.
    """
    number, held_out = {
        "s0": (subject if sequence % 5 == 4 else -1, {0: "val", 1: "val"} | dict.fromkeys(range(2, 10), "test")),
        "s1": (subject, {6: "val", 7: "test", 8: "test"}),
        "s2": (camera, {6: "val", 7: "test"}),
        "s3": (sequence // 5, {3: "val", 19: "val", 7: "test", 11: "test", 15: "test"}),
    }[setup]
    return held_out.get(number, "train")


def _films(root: Path, setup: str) -> Iterator[tuple[str, str, str]]:
    """The sequence, as SUBJECT/SEQUENCE, the camera and the split of each film."""
    for folder in sorted(root.glob("*-subject-[0-9][0-9]")):
        sequences = sorted(path.name for path in folder.glob("*/"))
        if setup in ("s0", "s3") and len(sequences) != 100:
            raise UserError(
                f"{folder}: {len(sequences)} sequences; expected 100, since data.setup = {setup!r} goes by their "
                "numbers. Unpack the subject again, or set data.setup = 's1' or 's2'."
            )
        for number, sequence in enumerate(sequences):
            for view, camera in enumerate(CAMERAS):
                yield f"{folder.name}/{sequence}", camera, split_of(setup, int(folder.name[-2:]) - 1, view, number)


def _meta(file: Path) -> tuple[int, bool]:
    """The number of frames of a sequence, and whether its hand is a left one."""
    with dataset_file(file, "num_frames, and 'left' or 'right' as the first of mano_sides") as path:
        meta = yaml.safe_load(path.read_bytes())
        return int(meta["num_frames"]), {"left": True, "right": False}[meta["mano_sides"][0]]


def _camera(file: Path) -> FloatArray:
    """The matrix (3, 3) of a colour camera, corner-based."""
    with dataset_file(file, "the numbers fx, fy, ppx and ppy of 'color'") as path:
        color = yaml.safe_load(path.read_bytes())["color"]
        return np.array(
            [[color["fx"], 0, color["ppx"] + 0.5], [0, color["fy"], color["ppy"] + 0.5], [0, 0, 1]], np.float32
        )


def _labels(root: Path, paths: Sequence[str]) -> Tables:
    """The labels of N images: xyz_m (N, 21, 3) and joints_px (N, 21, 2), as the files have them."""
    log.info("%s/*/*/*/labels_*.npz are read; this takes minutes, once", root)
    xyz_m, joints_px = [], []
    for image in paths:
        file = (root / image.replace("/color_", "/labels_")).with_suffix(".npz")
        with (
            dataset_file(file, "the arrays joint_3d and joint_2d") as path,
            np.load(path, allow_pickle=False) as labels,
        ):
            xyz_m.append(labels["joint_3d"].astype(np.float32).reshape(len(HAND), 3))
            joints_px.append(labels["joint_2d"].astype(np.float32).reshape(len(HAND), 2))
    return {"xyz_m": np.array(xyz_m), "joints_px": np.array(joints_px)}

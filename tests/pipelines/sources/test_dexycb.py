"""DexYCB's layout, made small: three people, a right and a left hand of each, two frames of two cameras."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.dexycb import CAMERAS, split_of
from tests.pipelines.sources.layouts import assert_refused, hand_m, write_image

SUBJECTS = ("20200709-subject-01", "20200928-subject-07", "20201002-subject-08")
FRAMES = [*product(SUBJECTS, ("right", "left"), CAMERAS[:2], ("000000", "000001"))]
JOINTS_M = {
    frame: hand_m(seed) + np.array([0.02, -0.03, 0.7]) if seed else np.full((21, 3), -1.0)  # no hand is visible
    for seed, frame in enumerate(FRAMES)
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "calibration" / "intrinsics").mkdir(parents=True)
    for camera in CAMERAS:
        file = tmp_path / "calibration" / "intrinsics" / f"{camera}_640x480.yml"
        file.write_text("color:\n  fx: 613.0\n  fy: 612.0\n  ppx: 313.25\n  ppy: 245.0\ndepth:\n  fx: 1.0\n")
    for (subject, side, camera, number), joints_m in JOINTS_M.items():
        folder = tmp_path / subject / f"2020_{side}"
        write_image(folder / camera / f"color_{number}.jpg", 640, 480)
        (folder / "meta.yml").write_text(f"num_frames: 2\nmano_sides:\n- {side}\nserials:\n- '{camera}'\n")
        points_px = joints_m[:, :2] / joints_m[:, 2:] * [613, 612] + [313.25, 245]
        np.savez(folder / camera / f"labels_{number}.npz", joint_3d=joints_m[None], joint_2d=points_px[None])
    return tmp_path


def test_frames_have_the_labels_of_their_camera(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / SUBJECTS[0] / "2020_left" / CAMERAS[1] / "color_000000.jpg").unlink()
    index = load_index(DataConfig("dexycb", str(root), split="train", setup="s1", box_margin=1.0))
    assert f"{root}: 6 of 32 frames are used; the images of 25 are missing, and 1 show no hand" in caplog.messages
    row = index.paths.index(f"{SUBJECTS[0]}/2020_left/{CAMERAS[1]}/color_000001.jpg")
    xyz_m = JOINTS_M[SUBJECTS[0], "left", CAMERAS[1], "000001"]
    np.testing.assert_allclose(index.targets["xyz_m"][row], xyz_m, rtol=1e-5)
    assert index.targets["K"][row].tolist() == [[613, 0, 313.75], [0, 612, 245.5], [0, 0, 1]], "from the pixel's corner"
    points_px = xyz_m[:, :2] / xyz_m[:, 2:] * [613, 612] + [313.75, 245.5]
    np.testing.assert_allclose(index.tables["keypoints_px"][row], points_px, atol=1e-3)
    assert index.mirrored.tolist() == ["left" in path for path in index.paths]
    assert sorted(Counter(index.groups.tolist()).values()) == [1, 1, 2, 2], "two cameras show one moment"


def test_parts_and_splits_are_those_of_the_setup(root: Path) -> None:
    parts: list[tuple[Any, tuple[str, ...]]] = [
        ({"split": "train"}, SUBJECTS[:1]), ({"split": "val"}, SUBJECTS[1:2]), ({}, SUBJECTS[:2]),
        ({"part": "evaluation"}, SUBJECTS[2:]),
    ]  # fmt: skip
    for keys, subjects in parts:
        index = load_index(DataConfig("dexycb", str(root), setup="s1", **keys))
        assert {path.split("/")[0] for path in index.paths} == {*subjects}
    for setup, sizes in {
        "s0": {"train": 6400, "val": 320, "test": 1280},
        "s1": {"train": 5600, "val": 800, "test": 1600},
        "s2": {"train": 6000, "val": 1000, "test": 1000},
        "s3": {"train": 6000, "val": 800, "test": 1200},
    }.items():
        assert Counter(split_of(setup, *film) for film in product(range(10), range(8), range(100))) == sizes
    for film, split in ((("s0", 9, 0, 4), "test"), (("s2", 0, CAMERAS.index("932122061900"), 0), "val")):
        assert split_of(*film) == split


@pytest.mark.parametrize(
    ("keys", "damaged", "message"),
    [
        ({"setup": "s0"}, "-", "subject-01: 2 sequences; expected 100, since data.setup = 's0'"),
        ({"root": "nowhere"}, "-", "no sequence of train or val of data.setup = 's1'; expected some as in"),
        ({}, "20*/*/meta.yml", r"meta.yml: cannot be read .*; expected num_frames, and"),
        ({}, "20*/*/meta.yml", "none of 0 images exists. Unpack"),
        ({}, "20*/*/*/labels_000001.npz", r"npz: cannot be read .*; expected the arrays joint_3d"),
        ({}, "calibration/*/*.yml", r"480\.yml: cannot be read .*; expected the numbers fx"),
        ({"part": "evaluation", "split": "val"}, "-", "test frames are not split"),
        ({"box": "boxes.csv"}, "-", "the boxes of DexYCB are around"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(root: Path, keys: Any, damaged: str, message: str) -> None:
    for file in root.glob(damaged):
        file.write_text("{num_frames: 0, mano_sides: [left]}" if "none of 0" in message else "a: ]")
    assert_refused(DataConfig(**{"source": "dexycb", "root": str(root), "setup": "s1", **keys}), message)

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.dexter_object import SEQUENCES, TIPS, load_dexter_object
from peclr_dali.skeleton import HAND
from tests.pipelines.sources.layouts import (
    assert_refused,
    dexter_tips_mm,
    write_boxes,
    write_coco_boxes,
    write_dexter_object,
)

FRAMES = dict(zip(SEQUENCES, (3, 2, 2, 1, 1, 2), strict=True))
HIDDEN = {("Grasp1", 1): [0, 3], ("Grasp2", 0): [0, 1, 2, 3, 4], ("Pinch", 0): [0, 1, 2, 3]}
FRAME = "data/Rigid/color/image_00000_color"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_dexter_object(tmp_path, FRAMES, hidden=HIDDEN)
    return tmp_path


def by_hand(tip_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A fingertip in metres from the colour camera, and its pixel."""
    x, y, z = -tip_mm[0], -tip_mm[1], tip_mm[2]
    xyz_m = np.array([
        0.9999 * x + 0.0034 * y + 0.0161 * z + 19.0473,
        -0.0033 * x + y - 0.0079 * z - 1.8514,
        -0.0162 * x + 0.0079 * y + 0.9998 * z - 4.7501,
    ]) / 1000  # fmt: skip
    return xyz_m, np.array([587.45209 * xyz_m[0] / xyz_m[2] + 325, 600.67456 * xyz_m[1] / xyz_m[2] + 249])


def test_fingertips_are_known_and_nothing_else(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = load_dexter_object(DataConfig("dexter_object", str(root)))
    assert len(index) == 10  # of 11: one frame shows no fingertip
    assert index.paths[:4] == [f"data/Grasp1/color/image_{frame:05d}_color.png" for frame in range(3)] + [
        "data/Grasp2/color/image_00001_color.png"
    ]
    assert all(index.path(row).is_file() for row in range(10))
    assert [record.message for record in caplog.records] == [
        f"{root}/data: 10 of 11 frames are used, of 6 of 6 sequences; the other frames have no annotated fingertip"
    ]
    assert [HAND.keypoints[tip] for tip in TIPS] == ["thumb_tip", "index_tip", "middle_tip", "ring_tip", "little_tip"]
    keypoints_px, xyz_m = index.tables["keypoints_px"], index.targets["xyz_m"]
    known = np.isfinite(xyz_m[..., 2])
    np.testing.assert_array_equal(known[..., None], np.isfinite(xyz_m[..., :1]))
    np.testing.assert_array_equal(np.repeat(known[..., None], 2, axis=2), np.isfinite(keypoints_px))
    expected = np.zeros((10, 21), bool)
    expected[:, list(TIPS)] = True
    expected[1, [4, 16]] = False
    expected[6, [4, 8, 12, 16]] = False
    np.testing.assert_array_equal(known, expected)
    for row, seed in ((0, 0), (1, 1), (3, 101), (9, 501)):
        for tip, tip_mm in zip(TIPS, dexter_tips_mm(seed), strict=True):
            if known[row, tip]:
                position_m, pixel = by_hand(tip_mm)
                np.testing.assert_allclose(xyz_m[row, tip], position_m, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(keypoints_px[row, tip], pixel, rtol=1e-4)
    assert index.mirrored.all()
    np.testing.assert_allclose(
        index.targets["K"][5], [[587.45209, 0.0, 325.0], [0.0, 600.67456, 249.0], [0.0, 0.0, 1.0]]
    )


def test_the_box_is_around_the_tips_and_no_smaller_than_a_hand(root: Path) -> None:
    index = load_dexter_object(DataConfig("dexter_object", str(root)))
    keypoints_px = index.tables["keypoints_px"]
    low, high = np.nanmin(keypoints_px, axis=1), np.nanmax(keypoints_px, axis=1)
    np.testing.assert_allclose(index.box_px[:, :2], (low + high) / 2, rtol=1e-5)
    assert (index.box_px[:, 2] >= (high - low).max(axis=1) * 0.9999).all()
    (depth_m,) = index.targets["xyz_m"][6, 20:, 2]  # the frame with a single fingertip
    np.testing.assert_allclose(index.box_px[6, 2], 0.12 * 587.45209 / depth_m, rtol=1e-5)


def test_a_file_of_boxes_may_have_all_frames(root: Path) -> None:
    boxes = root / "boxes.csv"
    config = DataConfig(source="dexter_object", root=str(root), box=str(boxes), box_margin=1)
    frames = [f"data/{path.parts[-3]}/color/{path.name}" for path in sorted(root.glob("data/*/color/*"))]
    write_boxes(boxes, {frame: [row, 0, row + 640, 480] for row, frame in enumerate(frames)})
    index = load_index(config)  # the box of the frame that is not used is ignored
    assert len(index) < len(frames)
    assert index.box_px[:, 0].tolist() == [320 + frames.index(path) for path in index.paths]
    write_coco_boxes(root / "boxes.json", index.paths, 320, 240)
    assert_refused(replace(config, box=str(root / "boxes.json")), "images have another size than their labels say")
    assert_refused(DataConfig(source="dexter_object", root=str(root), split="train"), r"Dexter\+Object are not split")


def rewrite(change: Any) -> Any:
    def damage(root: Path) -> None:
        file = root / "data/Rigid/annotations/Rigid3D.txt"
        file.write_bytes(change(file.read_text()).encode("latin1"))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "data").rename(root / "x"), "none of the folders Grasp1, Grasp2, .* is there"),
        (lambda root: (root / "data/Rigid/color").rename(root / "c"), "Rigid/color: No such file.*Check the path"),
        (lambda root: (root / f"{FRAME}.png").rename(root / f"{FRAME}.bmp"),
         r"Rigid: 0 \.png, .* and 1 others in color, but 1 lines in .*convert frames"),
        (rewrite(lambda text: text + text), r"Rigid: 1 .* in color, but 2 lines in annotations/Rigid3D\.txt"),
        (rewrite(lambda text: "1, 2, 3; 4, 5, 6"), r"D\.txt: .*line 1: '1, 2, 3; 4, 5, 6'\); expected a line"),
        (rewrite(lambda text: "a, b, c;" * 6), "line 1: 'a, b, c;"),
        (rewrite(lambda text: "1, 2, inf;" * 6), "line 1: '1, 2, inf;"),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_in_one_line(root: Path, damage: Any, message: str) -> None:
    damage(root)
    assert_refused(DataConfig("dexter_object", str(root)), message, root)


def test_frames_without_any_annotation_are_refused(tmp_path: Path) -> None:
    write_dexter_object(tmp_path, {"Pinch": 1}, hidden={("Pinch", 0): [0, 1, 2, 3, 4]})
    assert_refused(
        DataConfig("dexter_object", str(tmp_path)), "leave no image of a usable hand", tmp_path / "data/*/annotations"
    )


def test_frames_without_leading_zeros_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_dexter_object(tmp_path, {"Pinch": 11}, hidden={})
    wanted = load_dexter_object(DataConfig("dexter_object", str(tmp_path)))
    for number in range(11):
        frame = tmp_path / f"data/Pinch/color/image_{number:05d}_color.png"
        frame.rename(frame.with_name(f"image_{number}_color.png"))
    found = load_dexter_object(DataConfig("dexter_object", str(tmp_path)))
    assert [path.rpartition("/")[2] for path in found.paths] == [f"image_{number}_color.png" for number in range(11)]
    np.testing.assert_array_equal(found.targets["xyz_m"], wanted.targets["xyz_m"])

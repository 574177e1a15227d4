"""Files of boxes: CSV with or without hands, and COCO; several hands in an image, left ones mirrored."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.boxes import read_boxes
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.skeleton import HAND
from tests.pipelines.sources.layouts import assert_refused, write_image
from tests.pipelines.sources.test_freihand import write_part
from tests.train.tiny_hands import write_hands

HEADER = "file,x0,y0,x1,y1,hand"
HANDS = """file,x0,y0,x1,y1,hand,confidence
b.jpg,50,10,60,30,left,0.9
a.jpg,,,,,none,
c.jpg,5,5,15,15,right,0.9
b.jpg,10,10,40,20,right,0.9
d.jpg,1,1,9,9,unreadable,
c.jpg,,,,,none,
b.jpg, 50.0,10,60,30,left,0.9
"""
COCO = {
    "images": [{"id": 7 + row, "file_name": f"{name}.jpg"} for row, name in enumerate("abcde")],
    "categories": [{"id": 1, "name": "Left_hand"}, {"id": 2, "name": "hand"}, {"id": 3, "name": "left or right"}],
    "annotations": [
        {"image_id": 8, "category_id": 1, "bbox": [50, 10, 10, 20]},
        {"image_id": 9, "category_id": 2, "bbox": [5, 5, 10, 10]},
        {"image_id": 8, "category_id": 2.0, "bbox": [10, 10, 30, 10]},
        {"image_id": 10, "bbox": [1, 1, 30, 10], "iscrowd": "1"},
    ],
}
CORNERS: dict[str, list[dict[str, object]]] = {  # of one image nothing is said
    "images": [{"id": 0, "file_name": "b.jpg", "width": "80", "height": 60}, {"id": 1, "file_name": "a.jpg"}],
    "annotations": [{"image_id": 0, "bbox": [50, 10, 60, 30]}, {"image_id": 1, "bbox": [5, 50, 9, 59]}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for name in "abcde":
        write_image(root / f"{name}.jpg", 80, 60)
    return root


@pytest.mark.parametrize("start", ["", "\ufeff"])  # a byte order mark
@pytest.mark.parametrize("form", ["csv", "json"])
def test_each_hand_is_a_sample_and_the_rest_is_left_out(
    root: Path, form: str, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    boxes = root / f"boxes.{form}"
    coco = (
        json.dumps(COCO).replace('"category_id": 1', '"category_id": "1"').replace('"id": 7', '"width": null, "id": 7')
    )
    boxes.write_text(start + (HANDS.replace("hand", "Hand", 1) if form == "csv" else coco))
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    assert index.paths == ["b.jpg", "b.jpg", "c.jpg"]
    np.testing.assert_array_equal(index.box_px, np.array([(55, 20, 20), (25, 15, 30), (10, 10, 10)], np.float32))
    assert index.mirrored.tolist() == [True, False, False]
    assert index.groups[0] == index.groups[1] != index.groups[2]  # the hands of an image stay together in subsets
    assert [record.message for record in caplog.records] == [
        *[
            f"{boxes}: 2 images have a box and a row with none or unreadable, which is left out",
            f"{boxes}: 1 rows repeat a hand of a row before, and are left out",
        ]
        * (form == "csv"),
        f"{boxes}: 3 hands, 1 of them left, in 2 of 5 images; images without a hand are left out",
    ]
    margin = load_index(DataConfig("folder", str(root), box=str(boxes), box_margin=2.0))
    np.testing.assert_array_equal(margin.box_px[:, 2], [40, 60, 20])


def test_without_hands_an_image_without_a_box_is_used_whole(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    boxes = root / "boxes.csv"
    boxes.write_text("file,y0,x0,x1,y1,note\nc.jpg,20,10,50,30,x\n./b.jpg,1, 0.5,2.5,9\n")
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    assert index.mirror is None
    expected = [(0, 0, 0), (1.5, 5, 8), (30, 25, 40), (0, 0, 0), (0, 0, 0)]
    np.testing.assert_array_equal(index.box_px, np.array(expected, np.float32))
    assert [record.message for record in caplog.records] == [
        f"{boxes}: no column 'hand', so no hand is taken for a left one",
        f"{boxes}: no box for 3 of 5 images (a.jpg the first); for these, the whole image is used",
    ]


def test_a_source_with_one_hand_in_an_image_keeps_its_images(tmp_path: Path) -> None:
    write_part(tmp_path, "training", 2, 8)
    name = "training/rgb/00000000.jpg"
    boxes = tmp_path / "boxes.csv"
    boxes.write_text(f"{HEADER}\n{name},16,7,26,17,left\n")
    config = DataConfig(root=str(tmp_path), box=str(boxes), box_margin=1.0)
    index = load_index(config)
    assert (len(index), index.mirror) == (8, None)
    np.testing.assert_array_equal(index.box_px[:2], [(21, 12, 10), (0, 0, 0)])
    boxes.write_text(f"{HEADER}\n{name},16,7,26,17,left\n{name},16,7,26,18,left\n")
    assert_refused(config, f"line 3: a second box for '{name}'; expected one")


def test_a_row_may_lack_its_landmarks_but_not_some_of_them(tmp_path: Path, root: Path) -> None:
    from tools.find_boxes import COLUMNS, hand_row

    whole = hand_row("a.jpg", "left", np.full((21, 2), [20.0, 30.0]) + np.arange(21)[:, None])
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("\n".join(map(",".join, [COLUMNS, ["a.jpg", "21.0", *whole[2:6]], whole])))
    keypoints_px = load_folder(DataConfig("folder", str(root), box=str(boxes))).tables["keypoints_px"]
    assert np.isnan(keypoints_px[0]).all()
    np.testing.assert_allclose(keypoints_px[1], [20.0, 30.0] + np.arange(21)[:, None], atol=0.06)
    boxes.write_text("\n".join(map(",".join, [COLUMNS, ["a.jpg", "0", "0", "80", "60", "left", *["0.5"] * 42]])))
    assert_refused(
        DataConfig("folder", str(root), box=str(boxes)),
        r"1 of 1 hands have keypoints far from their boxes.*not fractions",
    )
    for cell in ("x", "", "inf", "1e300"):
        boxes.write_text("\n".join(map(",".join, [COLUMNS, [*whole[:-1], cell]])))
        assert_refused(
            DataConfig("folder", str(root), box=str(boxes)), r"line 2: .*expected 42 numbers in wrist_x to little_tip_y"
        )


@pytest.fixture(params=["", "empty landmarks"])
def labelled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Index]:
    """A small FreiHAND as a folder with a CSV of its boxes, 3D joints and cameras; every third hand is a left one."""
    landmarks = [f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"] if request.param else []
    write_hands(tmp_path / "hands", 6)
    index = load_index(DataConfig(root=str(tmp_path / "hands"), box="joints", box_margin=1.0))
    joints = [f"{name}_{axis}_m" for name in HAND.keypoints for axis in "xyz"]
    rows = [",".join([HEADER, *landmarks, *joints, "fx,fy,cx,cy"])]
    for number, (path, box_px, xyz_m, camera) in enumerate(
        zip(index.paths, index.box_px, index.targets["xyz_m"], index.targets["K"], strict=True)
    ):
        edges = [*(box_px[:2] - box_px[2] / 2), *(box_px[:2] + box_px[2] / 2)]
        camera[:2] += np.array([[10, 0, 3], [0, 20, -2]])  # no number twice
        hand = [("right", "right", "left")[number % 3], *[""] * len(landmarks)]
        rows.append(",".join(map(str, [path, *edges, *hand, *xyz_m.ravel(), *camera[[0, 1, 0, 1], [0, 1, 2, 2]]])))
    (tmp_path / "joints.csv").write_text("\n".join(rows))
    return tmp_path / "joints.csv", index


def test_joints_and_a_camera_beside_a_folder_are_the_labels_of_a_dataset(labelled: tuple[Path, Index]) -> None:
    file, expected = labelled
    config = DataConfig("folder", str(expected.root), box=str(file), box_margin=1.0)
    index = load_index(config)
    assert (index.paths, index.mirrored.tolist()) == (list(expected.paths), [False, False, True] * 8)
    for name in ("K", "xyz_m"):
        np.testing.assert_array_equal(index.targets[name], expected.targets[name])
    points = index.targets["xyz_m"] @ index.targets["K"].mT
    np.testing.assert_allclose(index.tables["keypoints_px"], points[..., :2] / points[..., 2:], atol=1e-4)
    np.testing.assert_allclose(index.box_px, expected.box_px, atol=1e-4)
    parts = [load_index(replace(config, split=split)).paths
             for split in ("train", "val")]  # fmt: skip
    assert sorted(path for part in parts for path in part) == list(expected.paths)
    assert [len(part) for part in parts] == [19, 5]


def camera_of_twice_the_size(text: str) -> str:
    header, *rows = text.splitlines()
    cells = [row.split(",") for row in rows]
    return "\n".join([header, *(",".join([*row[:-4], *(str(2 * float(cell)) for cell in row[-4:])]) for row in cells)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("fx,fy", "fx,f"), "line 1 is .* with no columns 'fy'; expected a header"),
        (lambda text: text.replace("fx,fy,cx,cy", "a,b,c,d"), "no valid camera matrix K"),
        (
            lambda text: text.replace(",170.0,180.0,", ",1.6,180.0,"),
            "no valid camera matrix K.*K 1.6, 0, .*focal lengths of 10 to",
        ),
        (
            camera_of_twice_the_size,
            "24 of 24 hands have keypoints far .*cameras of images of another size",
        ),
        (
            lambda text: f"{text}\n{text.splitlines()[-1]}7",
            "line 26: other labels of a hand above; expected each hand on",
        ),
        (lambda text: text.replace("thumb_tip_z_m", "thumb_tip_z"), "with no columns 'thumb_tip_z_m'"),
        (lambda text: text[: text.rindex(",")], r"line 25: \d+ cells; expected \d+, .*file cut\? Copy it again"),
        (lambda text: text.replace(",hand,", ",side,"), "line 2: keypoints and no column 'hand'; expected left, right"),
        (
            lambda text: re.sub(r"(?<=,)0\.[5-8]\d+", "500", text),
            "24 of 24 hands have joints behind the camera, or more than 20 m.* in metres",
        ),
    ],
)
def test_wrong_joints_end_in_one_line(labelled: tuple[Path, Index], change: Callable[[str], str], message: str) -> None:
    file, index = labelled
    file.write_text(change(file.read_text()))
    assert_refused(DataConfig("folder", str(index.root), box=str(file)), message, file)


PLAIN = "file,x0,y0,x1,y1\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.csv", PLAIN + "y.jpg,0,0,9,9\nz.jpg,0,0,9,9\n", "line 2: there is no image 'y.jpg'.*such as 'a.jpg'"),
        ("b.csv", PLAIN + "c.jpg,0,0,9,9\nc.jpg,0,0,9,9\n", "line 3: a second box for 'c.jpg'"),
        ("b.csv", PLAIN + "c.jpg,0,0,9\n", r"line 2: \['0', '0', '9', ''\] is not a box"),
        ("b.csv", PLAIN + "c.jpg,9,0,9,9\n", "line 2: .* is not a box"),
        ("b.csv", PLAIN + "c.jpg,1,5,2,6,3,5,4,6\n", "line 2: 9 cells; expected 5, as in line 1. Are these decimal"),
        ("b.csv", f"x0,{PLAIN}", "with 2 columns 'x0'; expected a header"),
        ("b.csv", PLAIN + 'c.jpg,0,0,9,"9\nd.jpg,0,0,9,9\n', "cannot be read .*unexpected end of data"),
        ("b.csv", f"{HEADER}\nb.jpg,1,1,9,9\n", "line 2: hand is ''; expected left, right, none, unreadable"),
        ("b.csv", PLAIN.encode("utf-16"), "not text in UTF-8, or has a NUL; .* CSV"),
        ("b.csv", f"{HEADER},Hand\nb.jpg,1,1,9,9,left,right", "with 2 columns 'hand'; expected a header"),
        ("b.csv", PLAIN, "holds no box"),
        ("b.json", '{"c.jpg": [0, 0, 9, 9]}', r"it has no 'images'.*expected boxes as CSV, or in COCO's"),
        (
            "b.json",
            json.dumps(COCO).replace("[50, 10, 10, 20]", "[50, 10, 0, 20]"),
            "0: .50.0, 10.0, 50.0, 30.0. is not",
        ),
        ("b.json", json.dumps(COCO).replace('"image_id": 8', '"image_id": 3'), "of the 5 images has the id '3'"),
        ("b.json", json.dumps(COCO).replace('"id": 8', '"id": 9'), "several images have the same id"),
        ("b.json", json.dumps(COCO).replace("[50, 10, 10, 20]", '"none"'), "annotation 0: none is not a box"),
        (
            "b.json",
            json.dumps(COCO).replace('"category_id": 2,', '"a": 2,'),
            "annotation 1: none of the 3 categories has the id 'None'",
        ),
        ("b.json", json.dumps(COCO).replace('"id": 2', '"id": 1'), "several categories have the same id"),
        ("b.json", json.dumps(COCO).replace('"hand"', '"cup"'), "a category is 'cup', others say hand, left or right"),
        ("b.json", json.dumps(COCO).replace("[5, 5, 10, 10]", "[1e308, 5, 1e308, 1]"), "annotation 1: .* is not a box"),
        ("b.json", json.dumps(COCO).replace('"bbox": [5, 5, 10, 10]', '"a": 1'), "annotation 1: None is not a box"),
        (
            "b.json",
            json.dumps(CORNERS)
            .replace('"80", "height": 60', '160, "height": 120')
            .replace(', {"image_id": 1, "bbox": [5, 50, 9, 59]}', ""),
            "1 of 1 images have another size than their labels say",
        ),
        ("b.json", json.dumps(CORNERS), "most boxes end outside of their images; expected bbox as x, y, w"),
        ("b.txt", "", "expected a .csv or .json file"),
        ("missing/b.csv", None, "No such file or directory; expected boxes as CSV"),
    ],
)
def test_wrong_boxes_end_in_one_line(root: Path, name: str, text: str | bytes | None, message: str) -> None:
    boxes = root / name
    if text is not None:
        boxes.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(DataConfig("folder", str(root), box=str(boxes)), message, boxes)


@pytest.mark.parametrize(("box", "x_px"), [("[50, 40, 40, 15]", 70), ("[1, 1, 80, 60]", 41)])
def test_right_boxes_may_end_outside_of_their_images(root: Path, box: str, x_px: float) -> None:
    """Where corners are impossible, since the second one would be above the first; or of the image, counted from 1."""
    (root / "b.json").write_text(json.dumps(CORNERS).replace("[50, 10, 60, 30]", box))
    assert load_index(DataConfig("folder", str(root), box=str(root / "b.json"), split="all")).box_px[1, 0] == x_px


def test_boxes_of_absent_images_are_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "boxes.csv").write_text(PLAIN + "z.jpg,0,0,9,9\nc.jpg,0,0,9,9\nnone/a.jpg,0,0,9,9\n")
    boxes = read_boxes(root / "boxes.csv", ["a.jpg", "c.jpg"])
    assert (boxes.image.tolist(), boxes.box_px.tolist()) == ([1], [[4.5, 4.5, 9.0]])
    assert re.search(
        r"2 boxes of absent images are left out, the first: .*line 2: there is no image 'z.jpg'", caplog.text
    )


def test_names_are_compared_in_one_form_of_unicode(root: Path) -> None:
    write_image(root / "ha\u0308nde.jpg", 80, 60)  # as macOS writes it
    boxes, pairs = root / "boxes.csv", root / "pairs.csv"
    boxes.write_text(PLAIN + "./h\u00e4nde.jpg,0,0,9,9\n")
    pairs.write_text("file,positive\na.jpg,h\u00e4nde.jpg\n")
    index = load_index(DataConfig("folder", str(root), box=str(boxes), positive="file", pairs=str(pairs)))
    assert index.box_px[-1, 2] > 0
    assert index.partners is not None
    assert index.partners.rows.tolist() == [len(index) - 1]

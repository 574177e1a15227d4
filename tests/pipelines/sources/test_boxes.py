"""Files of boxes: CSV with or without hands, and COCO; several hands in an image, left ones mirrored."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from tests.pipelines.harness import NO_COLOUR, load, smooth_image
from tests.pipelines.sources.layouts import one_line, write_image
from tests.pipelines.sources.test_freihand import write_part

HEADER = "file,x0,y0,x1,y1,hand"
HANDS = """file,x0,y0,x1,y1,hand,confidence
b.jpg,50,10,60,30,left,0.9
a.jpg,,,,,none,
c.jpg,5,5,15,15,right,0.9
b.jpg,10,10,40,20,right,0.9
d.jpg,,,,,unreadable,
b.jpg, 50.0,10,60,30,left,0.9
"""
COCO = {
    "images": [{"id": 7 + row, "file_name": f"{name}.jpg"} for row, name in enumerate("abcde")],
    "categories": [{"id": 1, "name": "Left_hand"}, {"id": 2, "name": "hand"}],
    "annotations": [
        {"image_id": 8, "category_id": 1, "bbox": [50, 10, 10, 20]},
        {"image_id": 9, "category_id": 2, "bbox": [5, 5, 10, 10]},
        {"image_id": 8, "bbox": [10, 10, 30, 10]},
    ],
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
    boxes.write_text(start + (HANDS if form == "csv" else json.dumps(COCO)))
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    assert index.paths == ["b.jpg", "b.jpg", "c.jpg"]
    np.testing.assert_array_equal(index.box_px, np.array([(55, 20, 20), (25, 15, 30), (10, 10, 10)], np.float32))
    assert index.mirror is not None
    assert index.mirror.tolist() == [True, False, False]
    assert index.group is not None  # the hands of an image stay together in subsets
    assert index.group[0] == index.group[1] != index.group[2]
    assert [record.message for record in caplog.records] == [
        *[f"{boxes}: 1 rows repeat a hand of a row before, and are left out"] * (form == "csv"),
        f"{boxes}: 3 hands in 2 of 5 images; images without a hand are left out",
    ]
    margin = load_index(DataConfig("folder", str(root), box=str(boxes), box_margin=2.0))
    np.testing.assert_array_equal(margin.box_px[:, 2], [40, 60, 20])


def test_without_hands_an_image_without_a_box_is_used_whole(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    boxes = root / "boxes.csv"
    boxes.write_text("file,y0,x0,x1,y1,note\nc.jpg,20,10,50,30,x\n./b.jpg,1, 0.5,2.5,9\n")
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    assert index.mirror is None
    expected = [(0, 0, 0), (1.5, 5, 8), (30, 25, 40), (0, 0, 0), (0, 0, 0)]
    np.testing.assert_array_equal(index.box_px, np.array(expected, np.float32))
    assert [record.message for record in caplog.records] == [
        f"{boxes}: no box for 3 of 5 images (a.jpg the first); for these, the whole image is used"
    ]


def test_a_source_with_one_hand_in_an_image_keeps_its_images(tmp_path: Path) -> None:
    write_part(tmp_path, "training", 2, 8)
    name = "training/rgb/00000000.jpg"
    boxes = tmp_path / "boxes.csv"
    boxes.write_text(f"{HEADER}\n{name},1,2,11,12,left\n")
    config = DataConfig(root=str(tmp_path), box=str(boxes), box_margin=1.0)
    index = load_index(config)
    assert (len(index), index.mirror) == (8, None)
    np.testing.assert_array_equal(index.box_px[:2], [(6, 7, 10), (0, 0, 0)])
    boxes.write_text(f"{HEADER}\n{name},1,2,11,12,left\n{name},1,2,11,13,left\n")
    with pytest.raises(UserError, match=f"several boxes for '{name}'; this source has one hand in an image"):
        load_index(config)


def test_a_row_may_lack_its_landmarks_but_not_some_of_them(tmp_path: Path, root: Path) -> None:
    from tools.find_boxes import COLUMNS, hand_row

    whole = hand_row("a.jpg", "left", np.full((21, 2), [20.0, 30.0]) + np.arange(21)[:, None])
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("\n".join(map(",".join, [COLUMNS, ["a.jpg", "21.0", *whole[2:6]], whole])))
    keypoints_px = load_folder(DataConfig("folder", str(root), box=str(boxes))).keypoints_px
    assert keypoints_px is not None
    assert np.isnan(keypoints_px).all(axis=(1, 2)).tolist() == [True, False]
    for cell in ("x", "", "inf", "1e300"):
        boxes.write_text("\n".join(map(",".join, [COLUMNS, [*whole[:-1], cell]])))
        with pytest.raises(UserError, match=r"line 2: .* are no landmarks; expected 42 numbers"):
            load_folder(DataConfig("folder", str(root), box=str(boxes)))


PLAIN = "file,x0,y0,x1,y1\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.csv", PLAIN + "c.jpg,0,0,9,9\nz.jpg,0,0,9,9\n", "line 3: there is no image 'z.jpg'.*such as 'a.jpg'"),
        ("b.csv", PLAIN + "c.jpg,0,0,9,9\nc.jpg,0,0,9,9\n", "line 3: a second box for 'c.jpg'"),
        ("b.csv", PLAIN + "c.jpg,0,0,9\n", r"line 2: \['0', '0', '9', ''\] is not a box"),
        ("b.csv", PLAIN + "c.jpg,0,0,inf,9\n", "line 2: .* is not a box"),
        ("b.csv", PLAIN + "c.jpg,9,0,9,9\n", "line 2: .* is not a box"),
        ("b.csv", f"{HEADER}\nb.jpg,1,1,9,9,both", "line 2: hand is 'both'; expected left, right, none, unreadable"),
        ("b.csv", f"{HEADER}\nb.jpg,1,1,9,9", "line 2: hand is ''; expected left"),
        ("b.csv", "c.jpg,0,0,9,9\n", "line 1 is 'c.jpg,0,0,9,9'; expected a header with the columns file,x0"),
        ("b.csv", PLAIN.encode("utf-16"), "expected a header with the columns"),
        ("b.csv", PLAIN + "x" * 200_000, "field larger than"),
        ("b.csv", PLAIN, "holds no box"),
        ("b.json", '{"c.jpg": [0, 0, 9', "b.json: cannot be read"),
        ("b.json", '{"c.jpg": [0, 0, 9, 9]}', r"KeyError\('images'\).*expected boxes as CSV in UTF-8, or in COCO's"),
        ("b.json", json.dumps(COCO).replace("[50, 10, 10, 20]", "[50, 10, 0, 20]"), "annotation 0: .* is not a box"),
        ("b.json", '{"images": [], "annotations": []}', "holds no box"),
        ("b.txt", "", "expected a .csv or .json file"),
        ("missing/b.csv", None, "No such file or directory; expected boxes as CSV"),
    ],
)
def test_wrong_boxes_end_in_one_line(root: Path, name: str, text: str | bytes | None, message: str) -> None:
    boxes = root / name
    if text is not None:
        boxes.write_bytes(text if isinstance(text, bytes) else text.encode())
    with one_line(message, boxes):
        load_folder(DataConfig("folder", str(root), box=str(boxes)))


def views(index: Index) -> View:
    """Augmented views of all samples, in the order of the index."""
    order = EpochOrder(len(index), 2, seed=0, fixed=np.arange(2))
    augmentation = Augmentation(GeometryConfig(side_px=32), NO_COLOUR)
    (batch,) = load(index, [augmentation], batch=2, order=order, last=1, views="cpu")
    assert batch.samples[:, 0].tolist() == [0, 1]
    return batch.views[0]


def test_the_view_of_a_left_hand_is_that_of_a_right_one_in_a_mirror(tmp_path: Path) -> None:
    """A picture with right hands, and its mirror image, in which they are left ones: the same views, pixel by pixel."""
    picture = smooth_image(np.random.default_rng(0), 60, 81)
    keypoint_px, indices = np.array([[20.0, 30.0, 1.0], [58.5, 22.0, 1.0]]), []
    for hand, pixels in (("right", picture), ("left", picture[:, ::-1])):
        root = tmp_path / hand
        root.mkdir()
        assert cv2.imwrite(str(root / "a.png"), np.ascontiguousarray(pixels[..., ::-1]))
        edges = [(5, 10, 45, 50), (45, 8, 75, 38)]
        if hand == "left":
            edges = [(81 - x1, y0, 81 - x0, y1) for x0, y0, x1, y1 in edges]
        rows = [f"a.png,{','.join(map(str, box))},{hand}" for box in edges]
        (tmp_path / f"{hand}.csv").write_text("\n".join([HEADER, *rows]))
        indices.append(load_folder(DataConfig("folder", str(root), box=str(tmp_path / f"{hand}.csv"))))
    right, left = map(views, indices)
    torch.testing.assert_close(left.image.int(), right.image.int(), rtol=0, atol=1)
    assert torch.equal(left.matrix, right.matrix)  # the loss does not undo the mirror
    mirrored_px = keypoint_px * [-1, 1, 1] + [81, 0, 0]
    shown_px, other_px = (
        np.einsum("nij,nj->ni", view.source_to_view_px.numpy(), points)
        for view, points in ((right, keypoint_px), (left, mirrored_px))
    )
    np.testing.assert_allclose(other_px, shown_px, atol=1e-3)
    plain = views(dataclasses.replace(indices[1], mirror=None))
    assert (plain.image.int() - right.image.int()).abs().float().mean() > 10

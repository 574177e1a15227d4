"""Files of boxes that say which hand each box shows: several in an image, left ones mirrored, images without a hand."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

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
ROWS = [
    ("b.jpg", (50, 10, 60, 30), "left"),
    ("a.jpg", None, "none"),
    ("c.jpg", (5, 5, 15, 15), "right"),
    ("b.jpg", (10, 10, 40, 20), "right"),
    ("d.jpg", None, "unreadable"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for name in "abcde":
        write_image(root / f"{name}.jpg", 80, 60)
    return root


def write_boxes(file: Path, rows: list[Any], *, confidence: bool = False) -> Path:
    """Write rows of name, edges and hand as the suffix says."""
    if file.suffix == ".json":
        cells = ([name, *(box or [None] * 4), hand] for name, box, hand in rows)
        file.write_text(json.dumps([dict(zip(HEADER.split(","), row, strict=True)) for row in cells]))
        return file
    lines = [f"{HEADER}{',confidence' * confidence}"]
    for name, box, hand in rows:
        lines.append(f"{name},{','.join(map(str, box or [''] * 4))},{hand}{',0.9' * confidence}")
    file.write_text("\n".join([*lines, ""]))
    return file


@pytest.mark.parametrize("form", ["csv", "csv without confidence", "json"])
def test_each_hand_is_a_sample_and_the_rest_is_left_out(
    root: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    boxes = write_boxes(root / f"boxes.{form[:4].strip()}", ROWS, confidence=form == "csv")
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    assert index.paths == ["b.jpg", "b.jpg", "c.jpg"]
    np.testing.assert_array_equal(index.box_px, np.array([(55, 20, 20), (25, 15, 30), (10, 10, 10)], np.float32))
    assert index.mirror is not None
    assert index.mirror.tolist() == [True, False, False]
    assert index.group is not None  # the hands of an image stay together in subsets
    assert index.group[0] == index.group[1] != index.group[2]
    assert [record.message for record in caplog.records] == [
        f"{boxes}: 3 hands in 2 of 5 images; images without a hand are left out"
    ]
    margin = load_index(DataConfig("folder", str(root), box=str(boxes), box_margin=2.0))
    np.testing.assert_array_equal(margin.box_px[:, 2], [40, 60, 20])


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_hand_that_is_listed_twice_counts_once(root: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As in two files that were joined. Another box of the same side is another hand."""
    left, wider = ("b.jpg", (50, 10, 60, 30), "left"), ("b.jpg", (50, 10, 61, 30), "left")
    right, again = ("b.jpg", (50, 10, 60, 30), "right"), ("b.jpg", (50.0, 10, 60, 30), "left")
    none = ("a.jpg", None, "none")
    file = write_boxes(root.parent / f"boxes.{kind}", [left, right, wider, none, again, wider, none])
    index = load_folder(DataConfig("folder", str(root), box=str(file)))
    assert index.mirror is not None
    assert index.mirror.tolist() == [True, False, True]
    assert index.box_px[:, 0].tolist() == [55, 55, 55.5]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    where = "line 6" if kind == "csv" else "entry 5"
    assert line == f"{file}, {where}: the same hand as in a row before; 2 such rows are left out"


def test_a_source_with_one_hand_in_an_image_keeps_its_images(tmp_path: Path) -> None:
    write_part(tmp_path, "training", 2, 8)
    names = [f"training/rgb/{number:08d}.jpg" for number in range(8)]
    boxes = tmp_path / "boxes.csv"
    rows = [f"{names[0]},1,2,11,12,left,0.9", f"{names[1]},,,,,none,"]
    boxes.write_text("\n".join([f"{HEADER},confidence", *rows, ""]))
    config = DataConfig(root=str(tmp_path), box=str(boxes), box_margin=1.0)
    index = load_index(config)
    assert (len(index), index.mirror) == (8, None)
    np.testing.assert_array_equal(index.box_px[:2], [(6, 7, 10), (0, 0, 0)])
    boxes.write_text("\n".join([f"{HEADER},confidence", *rows, f"{names[0]},1,2,11,13,left,0.9"]))
    with pytest.raises(UserError, match=f"several boxes for '{names[0]}'; this source has one hand in an image"):
        load_index(config)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("b.jpg,1,1,9,9,both", "line 2: hand is 'both'; expected left, right, none, unreadable"),
        ("b.jpg,1,1,9,9", "line 2: hand is ''; expected left"),
        ("b.jpg,1,1,9,9,none", "line 2: hand is 'none', and the box is .'1', '1', '9', '9'.; expected no box there"),
        ("b.jpg,,,,,left", "line 2: .'', '', '', ''. is not a box"),
        ("b.jpg,1,1,9,9,left,0.5", "line 2: .'1', '1', '9', '9', '0.5'. is not a box"),
        ("b.jpg,1,1,9,9,left\nz.jpg,,,,,none", "line 3: there is no image 'z.jpg'"),
        ("b.jpg,,,,,none\nc.jpg,,,,,none", "holds no box"),
    ],
)
def test_wrong_rows_end_in_one_line(root: Path, rows: str, message: str) -> None:
    boxes = root / "boxes.csv"
    boxes.write_text(f"{HEADER}\n{rows}\n")
    with one_line(message):
        load_folder(DataConfig("folder", str(root), box=str(boxes)))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("left", 3, "entry 2: hand is 3; expected left"),
        ("left", None, "entry 2: hand is ''; expected left"),
        ("left", ["left"], "entry 2: hand is .'left'.; expected left"),
        (None, "left", "entry 1: hand is ''; expected left"),  # else a left hand would not be mirrored
    ],
)
def test_a_wrong_hand_in_json_ends_in_one_line(root: Path, first: object, second: object, message: str) -> None:
    box = (1, 1, 9, 9)
    boxes = write_boxes(root / "boxes.json", [("b.jpg", box, first), ("c.jpg", box, second)])
    with one_line(message):
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

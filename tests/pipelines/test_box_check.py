"""Boxes that show nothing are refused, or counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.box_check import check_keypoints
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from tests.pipelines.sources.layouts import write_image
from tests.pipelines.sources.test_freihand import write_part

WIDTH, HEIGHT, COUNT = 90, 60, 100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        write_image(root / f"{number:03}.png", WIDTH, HEIGHT)
    return root


def load(root: Path, tmp_path: Path, edges: list[list[float]]) -> Index:
    """The folder's index with these boxes, in turn."""
    file = tmp_path / "boxes.csv"
    rows = [",".join(map(str, (f"{number:03}.png", *edges[number % len(edges)]))) for number in range(COUNT)]
    file.write_text("\n".join(["file,x0,y0,x1,y1", *rows]))
    return load_index(DataConfig(source="folder", root=str(root), box=str(file)))


GOOD = [20.0, 10, 60, 50]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([0.2, 0.1, 0.7, 0.8], "100 of 100 boxes show nothing.*Are these fractions of the image"),
        ([-500, 10, -400, 50], r"100 of 100 boxes show nothing.*first that of 000\.png: centre -450, 30 and side 100"),
        ([900, 10, 1000, 50], "64 of 100 boxes show nothing.*belong to images of another size"),
        ([10, 65, 40, 85], "64 of 100 boxes show nothing"),  # below an image that is wider than high
        ([-5000, -5000, 5000, 5000], "64 of 100 boxes show nothing"),
        ([0, 0, 1e9, 1e9], "100 of 100 boxes are not valid"),
    ],
)
def test_boxes_that_show_nothing_are_refused(root: Path, tmp_path: Path, edges: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(root, tmp_path, [edges])
    with pytest.raises(UserError, match="boxes"):
        load(root, tmp_path, [edges, edges, GOOD])


def test_some_impossible_boxes_are_counted(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(root, tmp_path, [GOOD, GOOD, GOOD, GOOD, [10, -90, 50, -20]])
    (record,) = caplog.records
    assert "20 of 100 boxes show nothing" in record.message
    assert "Mend or remove these boxes" in record.message


@pytest.mark.parametrize(
    "edges", [GOOD, [-30, -30, 20, 20], [0, 0, WIDTH, HEIGHT], [80, 50, 400, 400], [-200, -200, 300, 300], [5, 5, 8, 8]]
)
def test_boxes_that_show_a_part_are_no_news(
    root: Path, tmp_path: Path, edges: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    load(root, tmp_path, [edges])
    assert not caplog.records


def test_boxes_made_from_keypoints_are_looked_at(tmp_path: Path) -> None:
    """A depth of zero projects to infinity."""
    write_part(tmp_path, "training", 2, 8)
    config = DataConfig(source="freihand", root=str(tmp_path), box="joints")
    labels = tmp_path / "training_xyz.json"
    xyz = np.array(json.loads(labels.read_text()))
    load_index(config)
    labels.write_text(json.dumps((xyz + np.array([9, 0, 0])).tolist()))
    with pytest.raises(UserError, match="boxes show nothing of their images"):
        load_index(config)


def test_keypoints_far_from_their_boxes_are_refused_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    """As those of another resolution, or of a row that slipped. Unknown ones, and those of whole images, are not."""
    keypoints_px = np.full((6, 21, 2), 400.0, np.float32)
    keypoints_px[:, 3] = np.nan
    box_px = np.array([[420, 380, 90]] * 5 + [[0, 0, 0]], np.float32)
    index = Index("hands", Path("hands"), [f"{row}.jpg" for row in range(6)], box_px, keypoints_px)
    check_keypoints(index)
    assert not caplog.records
    keypoints_px[1, 5, 0] = np.inf
    check_keypoints(index)
    assert "1 of 5 hands have keypoints far from their boxes, first that of 1.jpg" in caplog.text
    with pytest.raises(UserError, match=r"5 of 5 hands have keypoints far.*Expected pixels of the image"):
        check_keypoints(replace(index, keypoints_px=keypoints_px * 10))
    with pytest.raises(UserError, match="5 of 5 hands have keypoints far"):  # fractions, half a pixel added as for COCO
        check_keypoints(replace(index, keypoints_px=keypoints_px * np.float32(0.002) + np.float32(0.5)))
    shifted_px = keypoints_px - np.array([160, 160, 100, 160, 160, 160], np.float32)[:, None, None]
    with pytest.raises(UserError, match=r"4 of 5 hands lie outside of their boxes.*x before y, in pixels of one image"):
        check_keypoints(replace(index, keypoints_px=shifted_px))

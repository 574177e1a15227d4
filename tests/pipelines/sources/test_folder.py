import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE
from peclr_dali.pipelines.sources.folder import load_folder
from tests.pipelines.sources.layouts import one_line


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "hands"
    for name in ("b/z.PNG", "b/a.jpg", "a.JPEG", "c.jpg", "notes.txt", ".hidden.jpg", ".git/d.jpg", "b/ö 1.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


PATHS = ["a.JPEG", "b/a.jpg", "b/z.PNG", "b/ö 1.jpg", "c.jpg"]


def test_images_are_found_in_the_order_of_their_names(root: Path) -> None:
    index = load_folder(DataConfig("folder", str(root)))
    assert index.paths == PATHS
    assert index.name == "hands"
    assert index.path(1) == root / "b" / "a.jpg"
    np.testing.assert_array_equal(index.box_px, np.tile(np.array(WHOLE_IMAGE, np.float32), (5, 1)))
    assert index.box_px.dtype == np.float32


def test_links_are_followed_once(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "e.jpg").write_bytes(b"")
    (root / "a_loop").symlink_to(root)
    (root / "b" / "up").symlink_to("..")
    for other in ("a_second_name", "z_second_name"):
        (root / other).symlink_to(root / "b")
    (root / "out").symlink_to(elsewhere)
    (root / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert load_folder(DataConfig("folder", str(root))).paths == [*PATHS, "out/e.jpg"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_is_refused(root: Path, split: Any) -> None:
    with pytest.raises(UserError, match=f"data.split = '{split}': images in a folder are not split"):
        load_folder(DataConfig("folder", str(root), split=split))


@pytest.mark.parametrize("form", ["csv", "mapping", "objects"])
def test_boxes_become_squares_around_them(root: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    edges: dict[str, list[float]] = {"c.jpg": [10, 20, 50, 30], "./b/ö 1.jpg": [0.5, 1, 2.5, 9]}
    objects = [{"file": name, "x0": x0, "y0": y0, "x1": x1, "y1": y1} for name, (x0, y0, x1, y1) in edges.items()]
    boxes = root / ("boxes.csv" if form == "csv" else "boxes.json")
    if form == "csv":
        rows = [f"{name}, {', '.join(map(str, box))}" for name, box in edges.items()]
        boxes.write_text("\n".join(["file,x0,y0,x1,y1", *rows, ""]), encoding="utf-8-sig")
    else:
        boxes.write_text(json.dumps(edges if form == "mapping" else objects))
    index = load_folder(DataConfig("folder", str(root), box=str(boxes)))
    expected = [WHOLE_IMAGE] * 3 + [(1.5, 5, 8), (30, 25, 40)]
    np.testing.assert_array_equal(index.box_px, np.array(expected, np.float32))
    assert [record.message for record in caplog.records] == [
        f"{boxes}: no box for 3 of 5 images (a.JPEG the first); for these, the whole image is used"
    ]


def test_boxes_for_all_are_no_news(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    boxes = root / "boxes.json"
    boxes.write_text(json.dumps({name: [0, 0, 4, 6] for name in PATHS}))
    assert load_folder(DataConfig("folder", str(root), box=str(boxes))).box_px.tolist() == [[2, 3, 6]] * 5
    assert not caplog.records


HEADER = "file,x0,y0,x1,y1\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.csv", HEADER + "c.jpg,0,0,9,9\nd.jpg,0,0,9,9\n", "line 3: there is no image 'd.jpg'.*such as 'a.JPEG'"),
        ("b.csv", HEADER + "c.jpg,0,0,9,9\nc.jpg,0,0,9,9\n", "line 3: a second box for 'c.jpg'"),
        ("b.csv", HEADER + "c.jpg,0,0,9\n", r"line 2: \['0', '0', '9'\] is not a box"),
        ("b.csv", HEADER + "c.jpg,0,zero,9,9\n", "line 2: .* is not a box"),
        ("b.csv", HEADER + "c.jpg,0,0,inf,9\n", "line 2: .* is not a box"),
        ("b.csv", HEADER + "c.jpg,9,0,9,9\n", "line 2: .* is not a box"),
        ("b.csv", "c.jpg,0,0,9,9\n", "expected the header 'file,x0,y0,x1,y1'"),
        ("b.csv", "", "expected the header"),
        ("b.csv", HEADER + '"c.jpg,0,0,9,9\n', "line 2: there is no image"),
        ("b.json", '{"c.jpg": [0, 0, 9', "b.json: cannot be read \\("),
        ("b.json", "[" * 200_000, "b.json: cannot be read \\("),
        ("b.json", '{"c.jpg": 4}', r"b.json, 'c.jpg': \[4\] is not a box"),
        ("b.json", '{"c.jpg": [0, 0, 9, null]}', "is not a box"),
        (
            "b.json",
            '[{"file": "c.jpg", "x0": 1}]',
            "entry 1: found .*; expected .* the keys file, x0, y0, x1, y1",
        ),
        ("b.json", '[{"file": 3, "x0": 1, "y0": 1, "x1": 2, "y1": 2}]', "entry 1: there is no image 3"),
        ("b.json", '"c.jpg"', "expected {.*found '\"c.jpg\"'"),
        ("b.txt", "", "expected a .csv or .json file"),
        ("b.csv", "file,x0,y0,x1,y1\n", "holds no box"),
        ("b.json", "{}", "holds no box"),
        ("b.json", '{"a.JPEG": [0, 0, 4, 6], "a.JPEG": [0, 0, 5, 6]}', "the key 'a.JPEG' appears twice"),
        ("b.csv", "file;x0;y0;x1;y1\n", "Columns are separated by commas"),
        ("b.csv", "file,x0,y0,x1,y1\n".encode("utf-16"), "expected a file of boxes in UTF-8"),
        ("missing/b.csv", None, "No such file or directory; expected a file of boxes"),
        ("b.csv", b"\xff\xfe\x00", "expected a file of boxes in UTF-8"),
        ("b.csv", "x" * 200_000, "field larger than"),
        ("b.csv", HEADER + "c.jpg,0,0,9,9\n" + "x" * 200_000, "field larger than"),
        ("b.json", f'{{"c.jpg": [0, 0, 9, 1{"0" * 400}]}}', "is not a box"),
        ("b.json", f'{{"c.jpg": [0, 0, 9, 1{"0" * 5000}]}}', "b.json: cannot be read \\("),
        ("b.json", f'{{"c.jpg": {"[" * 200}{"]" * 200}}}', "is not a box"),
        ("b.json", f'{{"{"x" * 10_000}": [0, 0, 9, 9]}}', "there is no image"),
    ],
)
def test_wrong_boxes_end_in_one_line(root: Path, name: str, text: str | bytes | None, message: str) -> None:
    boxes = root / name
    if text is not None:
        boxes.write_bytes(text if isinstance(text, bytes) else text.encode())
    with one_line(message, boxes):
        load_folder(DataConfig("folder", str(root), box=str(boxes)))


def test_missing_and_empty_folders_end_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nowhere", r"nowhere: does not exist; expected a folder of \.jpg"),
        ("file.jpg", r"file\.jpg: is a file; expected a folder"),
        ("empty", r"empty: no \.jpg, \.jpeg, \.png, \.webp files in it or below it; found nothing\. Check the path"),
    ):
        with one_line(message):
            load_folder(DataConfig("folder", str(tmp_path / name)))
    for name in ("a.HEIC", "b.heic", "c.heic", "d.txt", "e.txt", "README"):
        (tmp_path / "empty" / name).write_bytes(b"")
    with one_line(r"found 3 \.heic, 2 \.txt, 1 without an ending\. .*convert other images to JPEG"):
        load_folder(DataConfig("folder", str(tmp_path / "empty")))


def test_links_in_a_circle_and_broken_links_are_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "b" / "loop.jpg").symlink_to("loop.jpg")
    (root / "there").symlink_to("back")
    (root / "back").symlink_to("there")
    (root / "gone.jpg").symlink_to("nowhere.jpg")
    assert load_folder(DataConfig("folder", str(root))).paths == PATHS
    (record,) = caplog.records
    assert "5 images are used; left out: 4 broken links; convert" in record.message
    assert f"'find {root} -xtype l' lists them" in record.message


def test_images_of_other_kinds_are_counted_in_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "b" / "new.heic").write_bytes(b"")
    assert load_folder(DataConfig("folder", str(root))).paths == PATHS
    (record,) = caplog.records
    assert record.message.startswith(f"{root}: 5 images are used; left out: 1 .heic; convert other images to JPEG")

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
    others = ("._c.jpg", ".DS_Store", "Thumbs.db", "@eaDir/c.jpg", "b/@eaDir/a.jpg", "$RECYCLE.BIN/c.jpg")
    for name in ("b/z.PNG", "b/a.jpg", "a.JPEG", "c.jpg", "notes.txt", ".git/d.jpg", "b/ö 1.jpg", *others):
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


def test_links_are_followed_once(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "e.jpg").write_bytes(b"")
    (root / "a_loop").symlink_to(root)
    (root / "b" / "up").symlink_to("..")
    for other in ("a_second_name", "z_second_name"):
        (root / other).symlink_to(root / "b")
    (root / "out").symlink_to(elsewhere)
    (root / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (root / "there").symlink_to("back")
    (root / "back").symlink_to("there")
    assert load_folder(DataConfig("folder", str(root))).paths == [*PATHS, "out/e.jpg"]
    (record,) = caplog.records
    assert "6 images are used; left out: 3 broken links; convert" in record.message


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_is_refused(root: Path, split: Any) -> None:
    with pytest.raises(UserError, match=f"data.split = '{split}': images in a folder are not split"):
        load_folder(DataConfig("folder", str(root), split=split))


def test_missing_and_empty_folders_end_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nowhere", r"nowhere: does not exist; expected a folder of \.jpg"),
        ("file.jpg", r"file\.jpg: is a file; expected a folder"),
        (
            "empty",
            r"empty: no \.jpg, \.jpeg, \.jpe, \.jfif, \.png, \.webp files in it .*; found nothing\. Check the path",
        ),
    ):
        with one_line(message):
            load_folder(DataConfig("folder", str(tmp_path / name)))
    for name in ("a.HEIC", "b.heic", "c.heic", "d.txt", "e.txt", "README"):
        (tmp_path / "empty" / name).write_bytes(b"")
    with one_line(r"found 3 \.heic, 2 \.txt, 1 without an ending\. .*convert other images to JPEG"):
        load_folder(DataConfig("folder", str(tmp_path / "empty")))


def test_images_of_other_kinds_are_counted_in_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "b" / "new.heic").write_bytes(b"")
    assert load_folder(DataConfig("folder", str(root))).paths == PATHS
    (record,) = caplog.records
    assert record.message.startswith(f"{root}: 5 images are used; left out: 1 .heic; convert other images to JPEG")

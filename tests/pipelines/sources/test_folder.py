from pathlib import Path

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE
from peclr_dali.pipelines.sources.folder import load_folder
from tests.pipelines.sources.layouts import assert_refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "hands"
    others = (
        "._c.jpg",
        ".DS_Store",
        "Thumbs.db",
        "@eaDir/c.jpg",
        "b/#recycle/a.jpg",
        "__MACOSX/c.jpg",
        "$RECYCLE.BIN/c.jpg",
    )
    for name in (
        "b/z.PNG",
        "b/a.jpg",
        "a.JPEG",
        "c.jpg",
        "d.jfif",
        "e.jpe",
        "notes.txt",
        ".git/d.jpg",
        "b/ö 1.jpg",
        *others,
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


PATHS = ["a.JPEG", "b/a.jpg", "b/z.PNG", "b/ö 1.jpg", "c.jpg", "d.jfif", "e.jpe"]


def test_images_are_found_in_the_order_of_their_names(root: Path) -> None:
    index = load_folder(DataConfig("folder", str(root)))
    assert index.paths == PATHS
    assert index.name == f"{root.parent.name}/hands"  # folders called "images" are told apart
    assert index.path(1) == root / "b" / "a.jpg"
    np.testing.assert_array_equal(index.box_px, np.tile(np.array(WHOLE_IMAGE, np.float32), (len(PATHS), 1)))
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
    assert "8 images are used; left out: 3 broken links; convert" in record.message
    for name in ("new.heic", "film.MP4", "more.zip", "notes.txt"):
        (root / "b" / name).write_bytes(b"")
    load_folder(DataConfig("folder", str(root)))
    assert "left out: 3 broken links, 1 .mp4, 1 .zip, 1 .heic; convert other images to JPEG or PNG" in caplog.text


def test_what_cannot_be_listed_ends_in_one_line(root: Path) -> None:
    for name, message in (("nowhere", "No such file"), ("c.jpg", "Not a directory")):
        assert_refused(DataConfig("folder", str(root / name)), rf"{name}: {message}.*Check the path", root)
    empty = root / "empty"
    empty.mkdir()
    for name in ("a.HEIC", "b.heic", "c.heic", "d.txt", "e.txt", "README"):
        (empty / name).write_bytes(b"")
    assert_refused(
        DataConfig("folder", str(empty)),
        r"found 3 \.heic, 2 \.txt, 1 without an ending\. .*convert other images to JPEG",
    )


def test_a_new_image_moves_at_most_one_other_to_the_other_part(tmp_path: Path) -> None:
    """Else a network would be measured on images that it was trained on."""
    for number in range(60):
        (tmp_path / f"{number:03}.jpg").write_bytes(b"")
    before = set(load_folder(DataConfig("folder", str(tmp_path), split="val")).paths)
    (tmp_path / "00.jpg").write_bytes(b"")  # the first in the order
    after = set(load_folder(DataConfig("folder", str(tmp_path), split="val")).paths)
    assert len(before) == len(after) == 12  # a fifth
    assert len(before & after) >= 11

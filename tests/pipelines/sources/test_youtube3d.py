import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.youtube3d import load_youtube3d
from tests.pipelines.sources.layouts import (
    assert_refused,
    mano_mesh,
    write_image,
    write_youtube3d,
    youtube3d_entries,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_youtube3d(tmp_path / "data", "train")
    return tmp_path / "data"


def write_regressor(root: Path) -> tuple[Path, np.ndarray]:
    matrix = np.random.default_rng(7).dirichlet(np.ones(778), 16)
    np.save(root / "J_regressor.npy", matrix)
    return root / "J_regressor.npy", matrix


def test_a_hand_is_a_row_with_the_square_around_its_mesh(root: Path) -> None:
    index = load_youtube3d(DataConfig("youtube3d", str(root)))
    frame = "youtube/Aa-1/video/frames"
    assert index.paths == [f"{frame}/12.png", f"{frame}/40.png", f"{frame}/40.png", "youtube/b_2/video/frames/7.png"]
    assert all(index.path(row).is_file() for row in range(4))
    for row in range(4):
        x, y, _ = mano_mesh(row).T
        expected = [(x.min() + x.max()) / 2, (y.min() + y.max()) / 2, max(np.ptp(x), np.ptp(y))]
        np.testing.assert_allclose(index.box_px[row], expected, rtol=1e-6)
    assert index.mirrored.tolist() == [False, False, True, True]
    assert index.groups.tolist() == [0, 1, 1, 2]
    assert index.keypoints_px is None
    assert index.targets == {}


def test_a_regressor_gives_keypoints_in_freihands_order(root: Path) -> None:
    file, matrix = write_regressor(root)
    index = load_youtube3d(DataConfig("youtube3d", str(root), regressor=str(file)))
    xyz_px = index.targets["xyz_px"]
    assert xyz_px.shape == (4, 21, 3)
    assert xyz_px.dtype == np.float32
    np.testing.assert_array_equal(xyz_px[..., :2], index.keypoints_px)
    for row in range(4):
        mesh = mano_mesh(row)
        joints = matrix @ mesh
        expected = {0: joints[0], 4: mesh[744], 8: mesh[320], 12: mesh[443], 16: mesh[555], 20: mesh[672]}
        # MANO's fingers: index, middle, little, ring, thumb, three joints each.
        expected |= {1: joints[13], 5: joints[1], 6: joints[2], 9: joints[4], 13: joints[10], 17: joints[7]}
        for keypoint, point in expected.items():
            np.testing.assert_allclose(xyz_px[row, keypoint], point, rtol=1e-5, err_msg=f"keypoint {keypoint}")


def test_frames_stored_as_jpeg_are_found_and_missing_ones_counted_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = root / "youtube/Aa-1/video/frames"
    (frames / "12.png").unlink()
    write_image(frames / "12.jpg", 320, 180)
    (root / "youtube/b_2/video/frames/7.png").unlink()
    index = load_youtube3d(DataConfig("youtube3d", str(root)))
    assert index.paths[0] == "youtube/Aa-1/video/frames/12.jpg"
    assert len(index) == 3
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"{root}/youtube_train.json: 3 of 4 hands are used. Left out are 1 without a frame")
    (root / "youtube/Aa-1").rename(root / "gone")
    write_image(root / "youtube/b_2/video/frames/7.png", 320, 180)
    assert load_youtube3d(DataConfig("youtube3d", str(root))).paths == ["youtube/b_2/video/frames/7.png"]


def test_a_video_of_another_resolution_has_its_boxes_scaled(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = write_regressor(root)
    before = load_youtube3d(DataConfig("youtube3d", str(root), regressor=str(file)))
    for frame in (12, 40):
        write_image(root / f"youtube/Aa-1/video/frames/{frame}.png", 640, 360)
    after = load_youtube3d(DataConfig("youtube3d", str(root), regressor=str(file)))
    factor = np.array([2, 2, 2, 1], np.float32)
    np.testing.assert_allclose(after.box_px, before.box_px * factor[:, None], rtol=1e-6)
    np.testing.assert_allclose(after.targets["xyz_px"], before.targets["xyz_px"] * factor[:, None, None], rtol=1e-6)
    assert "For 3, whose frame has another size" in caplog.text


def test_a_video_of_another_shape_is_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_image(root / "youtube/b_2/video/frames/7.png", 320, 240)
    assert len(load_youtube3d(DataConfig("youtube3d", str(root)))) == 3
    assert "and 1 whose frame has another aspect ratio" in caplog.text
    for frame in (12, 40):
        write_image(root / f"youtube/Aa-1/video/frames/{frame}.png", 180, 320)
    assert_refused(DataConfig("youtube3d", str(root)), r"youtube_train\.json: .* leave no image of a usable hand")


def test_annotations_are_read_once_and_again_when_they_change(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_youtube3d(DataConfig("youtube3d", str(root)))
    (entry,) = cache.glob("youtube3d-*.npz")
    with monkeypatch.context() as patched:
        patched.setattr("peclr_dali.pipelines.sources.youtube3d.ijson", None)  # nobody may read again
        again = load_youtube3d(DataConfig("youtube3d", str(root)))
    assert again.paths == first.paths
    np.testing.assert_array_equal(again.box_px, first.box_px)
    assert again.tables["mirror"].dtype == bool

    entries = youtube3d_entries()
    entries["annotations"].pop()
    (root / "youtube_train.json").write_text("\ufeff" + json.dumps(entries))  # with a byte order mark
    assert len(load_youtube3d(DataConfig("youtube3d", str(root)))) == 3

    (damaged,) = set(cache.iterdir()) - {entry}
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert len(load_youtube3d(DataConfig("youtube3d", str(root)))) == 3
    assert "unreadable or damaged; it is made again" in caplog.text
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    assert len(load_youtube3d(DataConfig("youtube3d", str(root)))) == 3


def test_parts_of_the_configuration(root: Path) -> None:
    for part in ("val", "test"):
        entries = youtube3d_entries()
        entries["annotations"] = entries["annotations"][: {"val": 1, "test": 2}[part]]
        write_youtube3d(root, part, entries)

    def rows(**keys: Any) -> int:
        return len(load_index(DataConfig(source="youtube3d", root=str(root), **keys)))

    assert (rows(), rows(split="train"), rows(split="val"), rows(part="evaluation")) == (4, 4, 1, 2)
    with pytest.raises(UserError, match="test images are not split"):
        rows(part="evaluation", split="val")
    with pytest.raises(UserError, match=r"boxes\.csv'.*YouTube3DHands has its own boxes"):
        rows(box="boxes.csv")


def broken(change: Any) -> Any:
    """Writes the annotations as `change` leaves or returns them."""

    def damage(root: Path) -> None:
        entries = youtube3d_entries()
        changed = change(entries)
        (root / "youtube_train.json").write_text(changed if isinstance(changed, str) else json.dumps(entries))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "youtube_train.json").unlink(), r"youtube_train\.json: No such file"),
        (lambda root: (root / "youtube").rename(root / "videos"), r"none of 3 images exists; the first would be"),
        (broken(lambda e: json.dumps(e)[:-200]), r"youtube_train\.json: cannot be read"),
        (broken(lambda e: json.dumps(e["images"])), "0 images and 0 annotations.; expected the dataset's"),
        (broken(lambda e: e["annotations"][2].update(image_id=9)), "annotation 2: none of the 3 images has the id '9'"),
        (broken(lambda e: e["annotations"][1].update(is_left="left")), "annotation 1: is_left is 'left', expected 0"),
        (broken(lambda e: e["annotations"][1]["vertices"].pop()), "annotation 1: vertices: found 777 x 3, expected"),
        (broken(lambda e: e["annotations"][0].pop("vertices")), r"annotation 0: KeyError\('vertices'\)"),
        (broken(lambda e: e["images"][0].update(name="../../x.png")), r"image 0: '\.\./\.\./x\.png' is no name like"),
        (broken(lambda e: e["images"][1].update(id=e["images"][0]["id"])), "several images have the same id"),
        (broken(lambda e: e["images"][1].update(width=0)), "image 1: width and height are "),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_in_one_line(root: Path, damage: Any, message: str) -> None:
    damage(root)
    assert_refused(DataConfig("youtube3d", str(root)), message, root)

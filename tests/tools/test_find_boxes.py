"""tools/find_boxes.py: what it lists, writes and goes on with; and, slowly, whether it finds hands."""

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import cv2
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("tqdm")

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources.boxes import read_boxes
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.skeleton import HAND
from peclr_dali.synthetic.dataset import make_dataset
from tests.conftest import Record
from tools import find_boxes
from tools.find_boxes import COLUMNS, hand_row, row_without_hand, rows_of

TOOL = Path(__file__).parents[2] / "tools" / "find_boxes.py"
UV = Path(sys.executable).parent / "uv"

LEFT_PX: Any = np.linspace([1.0, 12], [31.5, 32.5], 21)
RIGHT_PX: Any = np.linspace([40.0, 12], [60, 22], 21)


def two_hands(new_detector: Any, root: Path, name: str) -> list[list[str]]:
    return [hand_row(name, hand, points) for hand, points in (("left", LEFT_PX), ("right", RIGHT_PX))]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two images and another file, in the current folder."""
    (tmp_path / "a").mkdir()
    for name in ("1.jpg", "2.jpg", "3.HEIC"):
        (tmp_path / "a" / name).write_bytes(b"")
    monkeypatch.setattr(find_boxes, "rows_of", two_hands)
    monkeypatch.setattr(sys, "argv", ["find_boxes.py", "a", "boxes.csv"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_is_read(tmp_path: Path) -> None:
    """Whatever the names, and with a byte order mark as an editor may add it; landmarks stay with their hand."""
    file, latin1 = tmp_path / "boxes.csv", b"h\xe4nd.jpg".decode(errors="surrogateescape")
    with file.open("w", newline="", encoding="utf-8-sig", errors="surrogateescape") as opened:
        csv.writer(opened).writerows([
            COLUMNS, row_without_hand(" a, b.jpg", "none"), hand_row('say "ö".jpg', "left", LEFT_PX),
            hand_row('say "ö".jpg', "right", RIGHT_PX), row_without_hand(" z.jpg", "unreadable"),
            hand_row("two\nlines\u2028.jpg", "left", RIGHT_PX), hand_row(latin1, "right", LEFT_PX + 20),
        ])  # fmt: skip
    boxes = read_boxes(file, [latin1, "two\nlines\u2028.jpg", " a, b.jpg", 'say "ö".jpg', " z.jpg"])
    assert boxes.image.tolist() == [0, 1, 3, 3]
    expected = [[36.25, 42.25, 30.5], [50, 17, 20], [16.25, 22.25, 30.5], [50, 17, 20]]
    assert boxes.box_px == pytest.approx(np.array(expected), abs=0.051)
    np.testing.assert_array_equal(boxes.mirror, [False, True, True, False])
    np.testing.assert_allclose(
        boxes.labels["keypoints_px"].reshape(-1, 21, 2), [LEFT_PX + 20, RIGHT_PX, LEFT_PX, RIGHT_PX], atol=0.051
    )
    assert list(HAND.keypoints) == find_boxes.LANDMARKS


def test_it_lists_the_images_that_a_source_lists(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    files = ("b/c/1.jpg", "a.PNG", "x.jfif", ".hidden/2.jpg", "._a.PNG", "@eaDir/a.PNG", "$RECYCLE.BIN/2.jpg", "1.HEIC")
    for file in (*(root / name for name in files), elsewhere / "ö 3.webp"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (root / "a_loop").symlink_to(root)
    (root / "out").symlink_to(elsewhere)
    (root / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    names = find_boxes.files_under(root)
    assert names == ["1.HEIC", "a.PNG", "b/c/1.jpg", "out/ö 3.webp", "x.jfif"]
    assert names[1:] == load_folder(DataConfig("folder", str(root))).paths


def test_it_goes_on_where_it_was_stopped(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were changed by hand stay, those of other images follow. A log gets no progress bar."""
    find_boxes.main(standalone_mode=False)
    assert capsys.readouterr() == (
        "a: 2 images; 1 files with other endings left out\nboxes.csv: 2 left, 2 right, 0 none, 0 unreadable\n"
        "look at them: 'cli.py views' draws what training sees; it mirrors left hands\n", ""
    )  # fmt: skip
    out = photos / "boxes.csv"
    whole = out.read_bytes()
    head, *rows = whole.splitlines(keepends=True)
    for stop in (0, 1, 3, 5):  # before the header, or after an image
        out.write_bytes(b"".join([head, *rows][:stop]))
        find_boxes.main(standalone_mode=False)
        assert out.read_bytes() == whole
    changed = whole.replace(b"1.jpg", b"./1.jpg", 1).replace(b"left", b" right", 1).replace(b"\r\n", b"\n")
    out.write_bytes(changed)
    (photos / "a" / "0.jpg").write_bytes(b"")
    find_boxes.main(standalone_mode=False)
    assert out.read_bytes().startswith(changed)
    assert read_boxes(out, ["0.jpg", "1.jpg", "2.jpg"]).image.tolist() == [0, 0, 1, 1, 2, 2]


def test_crops_have_twice_the_box_and_at_most_512_pixels_a_side(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes and landmarks are those of the crop: the middle one is on the bright spot. 2.jpg cannot be decoded."""
    image: Any = np.zeros((600, 1200, 3), np.uint8)
    image[300:310, 800:810] = 255
    cv2.imwrite("a/1.jpg", image)
    monkeypatch.setitem(globals(), "RIGHT_PX", np.linspace([605, 105], [1005, 505], 21))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--crops", "crops"])
    find_boxes.main(standalone_mode=False)
    index = load_folder(DataConfig("folder", "crops", box="crops/crops.csv"))
    crop: Any = cv2.imread(f"crops/{index.paths[1]}", cv2.IMREAD_GRAYSCALE)
    assert crop.shape == (386, 512)  # to the image's edges: 600 and 1200 - 405 pixels
    spot_px = np.argwhere(crop > 127).mean(axis=0)[::-1] + 0.5
    np.testing.assert_allclose(
        [*spot_px, *index.tables["keypoints_px"][1, 10], *index.box_px[1]],
        np.array([400, 305, 400, 305, 400, 305, 400]) * 512 / 795, atol=0.3,
    )  # fmt: skip
    with Image.open(f"crops/{index.paths[1]}") as opened:
        assert opened.quantization[0][0] == 2  # type: ignore[attr-defined]  # of quality 95
    assert index.paths[0][:5] == index.paths[1][:5] == "1.jpg"
    assert index.groups[0] == index.groups[1]  # a frame's hands are in one part of a split
    with pytest.raises(click.UsageError):  # the crops stay as they are
        find_boxes.main(standalone_mode=False)


@pytest.mark.parametrize("text", ["file,x0,y0,x1,y1\n", ",".join(COLUMNS) + "\na.jpg,1,2"])
def test_a_file_of_another_kind_or_a_line_without_its_end_is_refused(text: str, photos: Path) -> None:
    (photos / "boxes.csv").write_text(text)
    with pytest.raises(click.UsageError):
        find_boxes.main(standalone_mode=False)
    assert (photos / "boxes.csv").read_text() == text


def test_an_image_on_which_the_detector_fails_is_unreadable(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is searched by a new detector, twice, since it shows no hand."""
    cv2.imwrite("a/1.jpg", np.zeros((8, 8, 3), np.uint8))

    class Detector:
        images = 0

        def process(self, image: np.ndarray) -> Any:
            self.images += 1
            if fails:
                raise RuntimeError
            return SimpleNamespace(multi_hand_landmarks=None, multi_handedness=None)

    find = partial(rows_of, Detector, Path("a"))
    fails = True
    assert find("1.jpg") == [row_without_hand("1.jpg", "unreadable")]
    fails = False
    assert find("1.jpg") == [row_without_hand("1.jpg", "none")]
    assert find_boxes._thread.detector.images == 2
    assert find("2.jpg") == [row_without_hand("2.jpg", "unreadable")]


@pytest.mark.slow
def test_hands_are_found_where_they_were_rendered(record: Record, tmp_path: Path) -> None:
    made = subprocess.run([UV, "sync", "--script", TOOL], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"uv cannot get the packages: {made.stderr.strip().splitlines()[-1]}")
    data, out = tmp_path / "hands", tmp_path / "boxes.csv"
    make_dataset(data, poses=20, seed=0)
    root = data / "training" / "rgb"
    files = sorted(root.iterdir())
    for file in files[40:60]:  # left hands, in another folder
        left = root / "left" / f"{file.stem}.png"
        left.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(left), np.fliplr(np.asarray(cv2.imread(str(file)))))
    (root / "bad.jpg").write_bytes(b"not an image")
    done = subprocess.run([UV, "run", TOOL, root, out], capture_output=True, text=True, check=True)
    assert "1 unreadable" in done.stdout

    labels: Any = {name: np.array(json.loads((data / f"training_{name}.json").read_text())) for name in ("K", "xyz")}
    points = np.einsum("nij,nkj->nki", labels["K"], labels["xyz"])
    truth_px = points[..., :2] / points[..., 2:]
    truth_px = truth_px[np.arange(len(files)) % len(truth_px)]
    index = load_folder(DataConfig("folder", str(root), box=str(out)))
    is_left = np.array([path.startswith("left/") for path in index.paths])
    rows = np.array([int(Path(path).stem) for path in index.paths])[~is_left]
    low_px, high_px = truth_px[rows].min(axis=1), truth_px[rows].max(axis=1)
    truth_side_px = (high_px - low_px).max(axis=1)
    moved_px = np.linalg.norm(index.box_px[~is_left, :2] - (low_px + high_px) / 2, axis=1)

    errors_px = np.linalg.norm(index.tables["keypoints_px"][~is_left] - truth_px[rows], axis=2).mean(axis=1)
    row = {
        "images": len(files),
        "image_px": 224,
        "found": len(np.unique(rows)),
        "keypoint_error_px": round(float(np.median(errors_px)), 2),
        "box_centre_error_px": round(float(np.median(moved_px)), 2),
        "box_side_over_true": round(float(np.median(index.box_px[~is_left, 2] / truth_side_px)), 3),
        "right_called_left": int(index.mirrored[~is_left].sum()),
        "mirrored_images": 20,
        "mirrored_found": len({path for path in index.paths if path.startswith("left/")}),
        "mirrored_called_right": int((~index.mirrored[is_left]).sum()),
    }
    record("find_boxes", **row)
    assert row["found"] >= 0.85 * len(files)
    assert row["keypoint_error_px"] < 10
    assert row["box_centre_error_px"] < 9
    assert 0.8 < row["box_side_over_true"] < 1.25
    assert row["right_called_left"] < 0.15 * row["found"]
    assert row["mirrored_called_right"] < 0.3 * row["mirrored_found"]

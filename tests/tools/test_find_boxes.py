"""tools/find_boxes.py: what it lists and goes on with; and, slowly, whether it finds hands."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

pytest.importorskip("tqdm")

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.partners import frames_of
from peclr_dali.pipelines.sources.boxes import read_boxes
from peclr_dali.pipelines.sources.folder import _NOT_READ, load_folder
from peclr_dali.skeleton import HAND
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.pose.predict import read_picture
from peclr_dali.train.runs.pictures import draw_skeleton
from tests.command_line import as_options, run_cli
from tests.conftest import Record
from tests.tools import mortal_detector
from tests.train import tiny_run
from tests.train.tiny_hands import random_hands_m
from tools import find_boxes
from tools.find_boxes import FoundHand, as_csv, rows_so_far

TOOL = Path(__file__).parents[2] / "tools" / "find_boxes.py"
UV = Path(sys.executable).parent / "uv"


def test_it_lists_the_images_that_a_source_lists(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    for file in (root / "b" / "c" / "1.jpg", root / "a.PNG", root / ".hidden" / "2.jpg", elsewhere / "ö 3.webp"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (root / "notes.txt").write_bytes(b"")
    (root / "a_loop").symlink_to(root)
    (root / "b" / "up").symlink_to("..")
    (root / "a_second_name").symlink_to(root / "b")
    (root / "out").symlink_to(elsewhere)
    (root / "b" / "out").symlink_to(elsewhere)
    (root / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    for name in ("1.HEIC", "b/2.heic", "3.tif"):
        (root / name).write_bytes(b"")
    os.mkfifo(root / "b" / "pipe.jpg")
    names, left_out = find_boxes.files_under(root)
    assert names == load_folder(DataConfig("folder", str(root))).paths == ["a.PNG", "b/c/1.jpg", "out/ö 3.webp"]
    assert left_out == {".heic": 2, ".tif": 1, "broken links": 1, "pipes or devices": 1}
    assert find_boxes.NOT_READ == _NOT_READ


LEFT_PX: Any = np.linspace([1.0, 12], [31.5, 32.5], 21)
RIGHT_PX: Any = np.linspace([40.0, 12], [60, 22], 21)
ROWS = [
    find_boxes.row_without_hand(" a, b.jpg", "none"),
    FoundHand(LEFT_PX, "left", 0.9).row('say "ö".jpg'),
    FoundHand(RIGHT_PX, "right", 0.7).row('say "ö".jpg'),
    find_boxes.row_without_hand(" z.jpg", "unreadable"),
]


def test_what_it_writes_is_read(tmp_path: Path) -> None:
    file = tmp_path / "boxes.csv"
    file.write_bytes(find_boxes.HEADER.encode() + as_csv(ROWS))
    boxes = read_boxes(file, [" a, b.jpg", 'say "ö".jpg', " z.jpg"])
    assert boxes.image.tolist() == [1, 1]
    assert boxes.box_px == pytest.approx(np.array([[16.25, 22.25, 30.5], [50, 17, 20]]), abs=0.051)
    assert boxes.mirror is not None
    assert boxes.mirror.tolist() == [True, False]
    assert boxes.keypoints_px is not None
    np.testing.assert_allclose(boxes.keypoints_px, [LEFT_PX, RIGHT_PX], atol=0.051)
    assert list(HAND.keypoints) == find_boxes.LANDMARKS


def test_landmarks_stay_with_their_hand(tmp_path: Path) -> None:
    """Rows in another order than the images: each keypoint lies in the box of its own sample."""
    folder, file = tmp_path / "images", tmp_path / "boxes.csv"
    folder.mkdir()
    for name in "abc":
        cv2.imwrite(str(folder / f"{name}.png"), np.zeros((64, 64, 3), np.uint8))
    places = {"c": LEFT_PX, "a": RIGHT_PX, "b": LEFT_PX + 20}
    file.write_bytes(
        find_boxes.HEADER.encode()
        + as_csv([FoundHand(place, "left", 0.9).row(f"{name}.png") for name, place in places.items()])
    )
    index = load_folder(DataConfig("folder", str(folder), box=str(file)))
    assert index.paths == ["a.png", "b.png", "c.png"]
    assert index.keypoints_px is not None
    np.testing.assert_allclose(index.keypoints_px, [places[name] for name in "abc"], atol=0.051)
    from_centre_px = np.abs(index.keypoints_px - index.box_px[:, None, :2]).max(axis=(1, 2))
    np.testing.assert_allclose(from_centre_px, index.box_px[:, 2] / 2, atol=0.11)


def test_a_row_may_lack_its_landmarks_but_not_some_of_them(tmp_path: Path) -> None:
    file = tmp_path / "boxes.csv"
    whole = FoundHand(LEFT_PX, "left", 0.9).row("a.jpg")
    for cells in (whole[:7], [*whole[:7], *[""] * 42]):
        file.write_bytes(find_boxes.HEADER.encode() + as_csv([cells, FoundHand(RIGHT_PX, "left", 0.9).row("b.jpg")]))
        keypoints_px = read_boxes(file, ["a.jpg", "b.jpg"]).keypoints_px
        assert keypoints_px is not None
        assert np.isnan(keypoints_px).all(axis=(1, 2)).tolist() == [True, False]
    for cells in (whole[:-1], *([*whole[:-1], cell] for cell in ("x", "", "inf", "nan", "1e300"))):
        file.write_bytes(find_boxes.HEADER.encode() + as_csv([cells]))
        with pytest.raises(UserError, match=r"line 2: 4[12] cells for landmarks, .*; expected 42 numbers"):
            read_boxes(file, ["a.jpg"])


@pytest.mark.parametrize(
    "name", ["a\u202fb.jpg", "\u3000.jpg", "a\xa0%d.jpg", "a\n.jpg", "a\u2028.jpg", "a\x85.jpg", "\udcff.jpg"]
)
def test_names_that_fit_in_a_line_are_read(tmp_path: Path, name: str) -> None:
    """macOS puts a narrow no-break space into the names of screenshots."""
    file = tmp_path / "boxes.csv"
    fits = find_boxes.fits_in_a_line(name)
    assert fits == name.endswith(("b.jpg", "\u3000.jpg", "d.jpg"))
    if fits:
        file.write_bytes(find_boxes.HEADER.encode() + as_csv([FoundHand(LEFT_PX, "left", 0.9).row(name)]))
        assert read_boxes(file, [name]).image.tolist() == [0]


def test_it_goes_on_wherever_it_was_killed(tmp_path: Path) -> None:
    """Cut anywhere: the rows that are kept are whole, and so are the images that they tell of."""
    whole = find_boxes.HEADER.encode() + as_csv(ROWS)
    file = tmp_path / "boxes.csv.part"
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        with file.open("r+b") as part:
            kept = rows_so_far(part)
            assert kept == ROWS[: len(kept)]
            assert len(kept) != 2  # half of an image
            part.write(as_csv(ROWS[len(kept) :]))
        assert file.read_bytes() == whole


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders with an image of the same name, as FreiHAND's parts have, in the current folder."""
    for folder, name in (("a", "1.jpg"), ("a", "2.jpg"), ("b", "1.jpg")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"")

    def found(root: Path, names: list[str], args: Any) -> Any:
        return ([FoundHand(LEFT_PX, "left", 0.9).row(name)] for name in names)

    monkeypatch.setattr(find_boxes, "find_all", found)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command; returns what it prints, or what it prints about an error."""

    def called(*arguments: str, refused: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["find_boxes.py", *arguments])
        if not refused:
            find_boxes.main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            find_boxes.main()
        return capsys.readouterr().err

    return called


def test_another_folder_and_other_options_are_refused(photos: Path, call: Callable[..., str]) -> None:
    out = photos / "boxes.csv"
    assert "2 hands" in call("a", "boxes.csv")
    before = out.read_bytes()
    for arguments, words in (
        (("b", "boxes.csv"), f"boxes.csv.job: the boxes were begun with IMAGES {photos}/a, not {photos}/b. "),
        (("a", "boxes.csv", "--confidence", "0.4"), "were begun with --confidence 0.5, not 0.4. "),
    ):
        (line,) = call(*arguments, refused=True).splitlines()
        assert words in line
        assert "name another file" in line
    assert out.read_bytes() == before
    assert "2 hands" in call("a/../a", "boxes.csv")
    assert out.read_bytes() == before


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"", b"\n\n"])
def test_lines_that_were_changed_by_hand_stay(photos: Path, call: Callable[..., str], end: bytes) -> None:
    """Whatever an editor makes of the ends of lines; a new image gets its row after them."""
    call("a", "boxes.csv")
    out = photos / "boxes.csv"
    changed = out.read_bytes().replace(b"left", b" right").rstrip().replace(b"\r\n", end or b"\n") + end
    out.write_bytes(changed)
    assert "2 hands (0 left, 2 right)" in call("a", "boxes.csv")
    assert out.read_bytes() == changed
    (photos / "a" / "0.jpg").write_bytes(b"")
    assert "3 hands (1 left, 2 right)" in call("a", "boxes.csv")
    assert out.read_bytes().startswith(changed)
    assert read_boxes(out, ["0.jpg", "1.jpg", "2.jpg"]).image.tolist() == [0, 1, 2]
    assert sorted(file.name for file in photos.iterdir() if file.is_file()) == ["boxes.csv", "boxes.csv.job"]


def test_a_stopped_run_leaves_the_file_as_it_was(
    photos: Path, call: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of images that got one by hand meanwhile are dropped."""
    call("a", "boxes.csv")
    out, found = photos / "boxes.csv", find_boxes.find_all
    before = out.read_bytes()
    for name in "3456":
        (photos / "a" / f"{name}.jpg").write_bytes(b"")

    def stopped(root: Path, names: list[str], args: Any) -> Any:
        yield from list(found(root, names, args))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(find_boxes, "find_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        call("a", "boxes.csv")
    assert out.read_bytes() == before
    out.write_bytes(before + as_csv([find_boxes.row_without_hand("3.jpg", "none")]))
    monkeypatch.setattr(find_boxes, "find_all", found)
    assert "5 hands (5 left, 0 right) in 5 images; 1 images without a hand" in call("a", "boxes.csv")
    assert [line[:5] for line in out.read_text().splitlines()[1:]] == [f"{number}.jpg" for number in (1, 2, 3, 4, 5, 6)]


WHOLE = find_boxes.HEADER.encode() + as_csv(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("mine.csv", b"file,x0,y0,x1,y1\n\xff\n", "mine.csv: no CSV in UTF-8"),
        ("mine.csv", b"file,x0,y0,x1,y1", "mine.csv: line 1 is 'file,x0,y0,x1,y1'; expected 'file,"),
        ("mine.csv", b"\xef\xbb\xbf", "mine.csv: line 1 is ''; expected 'file,"),
        ("mine.csv", WHOLE + b"a.jpg,1,2\r\n", "mine.csv, line 6: 'a.jpg,1,2'; expected file, x0, "),
        ("mine.csv", WHOLE + b"a.jpg,1,2,3,4,both\r\n", "mine.csv, line 6: 'a.jpg,1,2,3,4,both'; expected"),
        ("mine.csv", WHOLE + b'"a.jpg,' + b"1" * 200_000, "mine.csv: no CSV in UTF-8 (field larger"),
        ("mine.csv.part", b"mine", "mine.csv.part: line 1 is 'mine'; expected"),
        ("mine.csv.job", b"[]", "mine.csv.job: not what this script writes there"),
        ("mine.csv.job", b"[" * 100_000, "mine.csv.job: not what this script writes there"),
        ("mine.csv.job", b'{"name": "mine"}', "mine.csv.job: not what this script writes there"),
        ("mine.csv", None, "mine.csv: a folder, a pipe or a device; expected"),
        ("mine.csv.job", None, "mine.csv.job: a folder, a pipe or a device; expected"),
        ("mine.csv.part", None, "mine.csv.part: a folder, a pipe or a device; expected"),
        ("mine.json", b"{", "mine.json: expected a name that ends in .csv"),
        ("/dev/stdout", b"", "/dev/stdout: expected a name that ends in .csv"),
    ],
)
def test_other_files_are_not_touched(
    photos: Path, call: Callable[..., str], name: str, content: bytes | None, line: str
) -> None:
    """`None` is a pipe, of which a read would never end."""
    file = photos / name
    if content is None:
        os.mkfifo(file)
    elif content:
        file.write_bytes(content)
    out = name.removesuffix(".part").removesuffix(".job")
    assert line in call("a", out, refused=True).splitlines()[-1]
    if content:
        assert file.read_bytes() == content
    assert {one.name for one in photos.iterdir()} <= {"a", "b", "mine.csv.job", name}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("", "boxes.csv"), "argument IMAGES: the path is empty"),
        (("a", "none/boxes.csv"), "none/boxes.csv: No such file or directory. Name a file"),
        (("a", "boxes.csv", "--jobs", "1000000"), "expected 1 to 100 hands and 1 to 1024 processes"),
        (("c", "boxes.csv"), "c: no .jpg, .jpeg, .png, .webp files in it or below it; found 1 .heic. Check the path."),
    ],
)
def test_wrong_arguments_are_one_line(
    photos: Path, call: Callable[..., str], arguments: Sequence[str], line: str
) -> None:
    (photos / "c").mkdir()
    (photos / "c" / "1.HEIC").write_bytes(b"")
    assert line in call(*arguments, refused=True).splitlines()[-1]
    assert not (photos / "boxes.csv.job").exists()


def test_an_image_that_ends_its_process_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images before and after it are searched; a detector that never starts is an error instead."""
    monkeypatch.setattr(find_boxes, "start_process", mortal_detector.start_process)
    monkeypatch.setattr(find_boxes, "rows_of", mortal_detector.rows_of)
    names = ["a", "ends b", *"cdefghijkl", "ends m"]
    args = argparse.Namespace(jobs=1, confidence=0.5, hands=4)
    found = [rows[0] for rows in find_boxes.find_all(Path(), names, args)]
    assert [row[0] for row in found] == names
    assert [row[0] for row in found if row[5] == "unreadable"] == ["ends b", "ends m"]
    monkeypatch.setattr(find_boxes, "start_process", mortal_detector.never_starts)
    with pytest.raises(BrokenProcessPool):
        list(find_boxes.find_all(Path(), ["a"], args))


def test_images_beyond_the_detector_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side of 20,000 pixels, with its border, ends the process of MediaPipe; one pixel stays one."""

    def found(image: np.ndarray, border: float) -> list[FoundHand]:
        assert (1 + 2 * border) * max(image.shape) < 32_767
        return [FoundHand(np.full((21, 2), image.shape[1::-1], float), "left", 1.0)]

    monkeypatch.setattr(find_boxes, "find_with_border", found)
    for size in ((1, 20_000), (60_000, 60), (300_000, 1)):
        (hand,) = find_boxes.find_hands(np.zeros((*size, 3), np.uint8))
        np.testing.assert_allclose(hand.landmarks_px, np.full((21, 2), size[::-1]))


def write_video(file: Path, frames: Sequence[np.ndarray]) -> None:
    """A video of frames (H, W, 3) RGB."""
    file.parent.mkdir(parents=True, exist_ok=True)
    codec = cv2.VideoWriter.fourcc(*("mp4v" if file.suffix == ".mp4" else "MJPG"))
    writer = cv2.VideoWriter(str(file), codec, 25, frames[0].shape[1::-1])
    for frame in frames:
        writer.write(frame[..., ::-1])
    writer.release()


def drawn(hand_px: np.ndarray) -> np.ndarray:
    """A frame of 96 x 64 pixels with a hand (21, 2)."""
    frame = np.full((64, 96, 3), 90, np.uint8)
    draw_skeleton(frame, hand_px, HAND)
    return frame


def moving_hands_px(at_px: float) -> Any:
    """Forty frames (40, 21, 2) of a hand that turns and moves, the same pose in each frame of another video."""
    points = np.linspace(
        random_hands_m(np.random.default_rng(0), 1)[0], random_hands_m(np.random.default_rng(1), 1)[0], 40
    )
    flat = points[..., :2] / points[..., 2:]
    return 120 * (flat - flat.mean(axis=1, keepdims=True)) + [at_px, 30]


@pytest.fixture
def videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two videos and two damaged ones in a folder, and the hands in the frames of each; the detector knows them."""
    hands_px = {"a.mp4": moving_hands_px(40), "b/a.avi": moving_hands_px(55)}
    for name, moving in hands_px.items():
        write_video(tmp_path / "videos" / name, [drawn(hand_px) for hand_px in moving])
    whole = (tmp_path / "videos" / "b" / "a.avi").read_bytes()
    (tmp_path / "videos" / "bad.mp4").write_bytes(b"no video")
    (tmp_path / "videos" / "cut.avi").write_bytes(whole[: len(whole) // 2])
    hands_px["cut.avi"] = hands_px["b/a.avi"]

    def found(root: Path, names: list[str], args: Any) -> Any:
        for name in names:
            video, _, frame = name.rpartition("/")
            yield [FoundHand(hands_px[video][int(frame[6:12])], "right", 0.9).row(name)]

    monkeypatch.setattr(find_boxes, "find_all", found)
    monkeypatch.chdir(tmp_path)
    return hands_px


def test_frames_of_videos(
    videos: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["find_boxes.py", "videos", "boxes.csv", "--frames", "frames", "--every", "8"]
    monkeypatch.setattr(sys, "argv", command)
    find_boxes.main()
    printed = capfd.readouterr().err
    assert "unreadable: videos/bad.mp4" in printed
    assert re.search(r"cut: videos/cut.avi: [12]\d of 40 frames could be read", printed)
    boxes = Path("boxes.csv").read_bytes()
    names = sorted(str(file.relative_to("frames")) for file in Path("frames").rglob("*.jpg"))
    assert [name for name in names if "cut" not in name] == [
        f"{video}/frame_{number:06d}.jpg" for video in ("a.mp4", "b/a.avi") for number in range(0, 40, 8)
    ]
    frame = read_picture("frames/b/a.avi/frame_000032.jpg").astype(int)
    wrist_x, wrist_y = videos["b/a.avi"][32, 0].astype(int)
    assert frame[wrist_y, wrist_x].min() > 200  # the wrist is white
    Path("frames/a.mp4").rename("frames/.a.mp4.part")  # as a run leaves it that was stopped: the video is read again
    untouched = Path("frames/b/a.avi/frame_000000.jpg").stat().st_mtime_ns
    find_boxes.main()
    assert Path("boxes.csv").read_bytes() == boxes
    assert sorted(str(file.relative_to("frames")) for file in Path("frames").rglob("*.jpg")) == names
    assert Path("frames/b/a.avi/frame_000000.jpg").stat().st_mtime_ns == untouched
    assert not list(Path("frames").rglob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("videos", "boxes.csv"), "videos: no .jpg, .jpeg, .png, .webp files in it or below it; found 2 .mp4, 2 .avi."),
        (
            ("none.mp4", "boxes.csv", "--frames", "f"),
            "none.mp4: expected a video or a folder of videos. Check the path.",
        ),
        (("videos/bad.mp4", "boxes.csv", "--frames", "f"), "f: no .jpg, "),
        (("videos", "boxes.csv", "--frames", "mine"), "mine/a.mp4: not what this script writes there; expected frames"),
        (("videos/bad.mp4", "boxes.csv", "--frames", "mine"), "mine/.bad.mp4.part: not what this script writes there."),
        (("videos", "boxes.csv", "--frames", "f", "--every", "0"), "--every 0: expected 1 or more"),
    ],
)
def test_wrong_videos_are_one_line(
    videos: dict[str, Any], call: Callable[..., str], arguments: Sequence[str], line: str
) -> None:
    Path("mine/a.mp4").mkdir(parents=True)
    Path("mine/.bad.mp4.part").mkdir()
    Path("mine/.bad.mp4.part/mine.txt").write_text("mine")
    assert line in call(*arguments, refused=True).splitlines()[-1]
    assert [str(file) for file in Path("mine").rglob("*.*") if file.is_file()] == ["mine/.bad.mp4.part/mine.txt"]


def find_mine_and_train(find: Callable[..., object]) -> dict[str, str]:
    """Run the three commands of README, `find` for the first one: each hand's frame, and that of its positive."""
    readme = TOOL.parents[1].joinpath("README.md").read_text().replace("\\\n", "")
    lines = readme.split("From videos, pair each hand")[1].split("\n\n")[1].splitlines()
    (*uv, tool, videos, boxes, option, frames), mine, pretrain = map(shlex.split, lines)
    assert [uv, tool] == [[".venv/bin/uv", "run"], "tools/find_boxes.py"]
    assert mine[:2] == pretrain[:2] == [".venv/bin/python", "cli.py"]
    find(videos, boxes, option, frames, "--every", "4")
    assert run_cli(*mine[2:]) == 0
    assert run_cli(*pretrain[2:], *as_options([*tiny_run.TINY[1:], "train.epochs=1"])) == 0
    assert tiny_run.rows_of(Path("runs/videos"))
    with Path(mine[-1]).open(newline="") as file:
        return {row["file"]: row["positive"] for row in csv.DictReader(file)}


def test_from_videos_to_pre_training_on_pairs(
    videos: dict[str, Any], call: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hand is paired with the same moment of the other video."""
    for name in ("bad.mp4", "cut.avi"):
        (tmp_path / "videos" / name).unlink()
    assert find_mine_and_train(call) == {
        f"{video}/frame_{number:06d}.jpg": f"{other}/frame_{number:06d}.jpg"
        for video, other in (("a.mp4", "b/a.avi"), ("b/a.avi", "a.mp4"))
        for number in range(0, 40, 4)
    }
    index = load_folder(DataConfig("folder", "frames", box="boxes.csv"))
    sequence, frame = frames_of(index.paths, index.mirrored)
    assert sequence.tolist() == [*[0] * 10, *[1] * 10]
    assert frame.tolist() == [*range(0, 40, 4)] * 2


def require_detector() -> None:
    """Skip a test if uv cannot make the script's environment."""
    made = subprocess.run([UV, "sync", "--script", TOOL], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"uv cannot get the packages: {made.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
def test_from_rendered_videos_to_pre_training_on_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MediaPipe finds the hands of rendered films; each is paired with a hand of another film."""
    require_detector()
    make_dataset(tmp_path / "films", poses=96, sequences=3, seed=0)
    for film in sorted((tmp_path / "films" / "train").iterdir()):
        frames = [read_picture(str(file)) for file in sorted(film.glob("rgb/*.jpg"))]
        write_video(tmp_path / "videos" / f"{film.name}.mp4", frames)
    monkeypatch.chdir(tmp_path)

    def find(*arguments: str) -> None:
        subprocess.run([UV, "run", TOOL, *arguments], check=True)

    for file, positive in find_mine_and_train(find).items():
        assert file.split("/")[0] != positive.split("/")[0]


@pytest.mark.slow
def test_hands_are_found_where_they_were_rendered(record: Record, tmp_path: Path) -> None:
    require_detector()
    data, out = tmp_path / "hands", tmp_path / "boxes.csv"
    make_dataset(data, poses=20, seed=0)
    root = data / "training" / "rgb"
    files = sorted(root.iterdir())
    for file in files[40:60]:  # left hands, in another folder
        left = root / "left" / f"{file.stem}.png"
        left.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(left), np.ascontiguousarray(read_picture(str(file))[:, ::-1, ::-1]))
    (root / "bad.jpg").write_bytes(b"not an image")
    done = subprocess.run([UV, "run", TOOL, root, out], capture_output=True, text=True, check=True)
    assert "bad.jpg" in done.stderr
    assert "1 unreadable" in done.stdout

    labels: Any = {name: np.array(json.loads((data / f"training_{name}.json").read_text())) for name in ("K", "xyz")}
    points = np.einsum("nij,nkj->nki", labels["K"], labels["xyz"])
    truth_px = points[..., :2] / points[..., 2:]
    truth_px = truth_px[np.arange(len(files)) % len(truth_px)]
    index = load_folder(DataConfig("folder", str(root), box=str(out)))
    assert index.mirror is not None
    is_left = np.array([path.startswith("left/") for path in index.paths])
    rows = np.array([int(Path(path).stem) for path in index.paths])[~is_left]
    low_px, high_px = truth_px[rows].min(axis=1), truth_px[rows].max(axis=1)
    truth_side_px = (high_px - low_px).max(axis=1)
    moved_px = np.linalg.norm(index.box_px[~is_left, :2] - (low_px + high_px) / 2, axis=1)

    assert index.keypoints_px is not None
    errors_px = np.linalg.norm(index.keypoints_px[~is_left] - truth_px[rows], axis=2).mean(axis=1)
    row = {
        "images": len(files),
        "image_px": 224,
        "found": len(np.unique(rows)),
        "keypoint_error_px": round(float(np.median(errors_px)), 2),
        "box_centre_error_px": round(float(np.median(moved_px)), 2),
        "box_side_over_true": round(float(np.median(index.box_px[~is_left, 2] / truth_side_px)), 3),
        "right_called_left": int(index.mirror[~is_left].sum()),
        "mirrored_images": 20,
        "mirrored_found": len({path for path in index.paths if path.startswith("left/")}),
        "mirrored_called_right": int((~index.mirror[is_left]).sum()),
    }
    record("find_boxes", **row)
    assert row["found"] >= 0.85 * len(files)
    assert row["keypoint_error_px"] < 10
    assert row["box_centre_error_px"] < 9
    assert 0.8 < row["box_side_over_true"] < 1.25
    assert row["right_called_left"] < 0.15 * row["found"]
    assert row["mirrored_called_right"] < 0.3 * row["mirrored_found"]

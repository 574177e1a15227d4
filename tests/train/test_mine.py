"""The command mine: which hands are similar, that pairs are of other groups, and that training reads them."""

from __future__ import annotations

import csv
import re
import resource
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.boxes import _LANDMARKS, _WITH_CONFIDENCE
from peclr_dali.skeleton import HAND
from peclr_dali.train.data import similar
from peclr_dali.train.data.similar import distances, most_similar, shapes_of
from peclr_dali.train.runs.pictures import draw_skeleton
from tests.command_line import as_options, run_cli
from tests.conftest import Record
from tests.pipelines.sources.layouts import write_image
from tests.train import tiny_hands
from tests.train.tiny_hands import random_hands_m

POSES = 6


def hand_px(pose: int, *, side: float = 30.0, turn_deg: float = 0.0, at_px: float = 32.0) -> similar.Floats:
    """A hand (21, 2) of one of several poses, before a camera."""
    points = random_hands_m(np.random.default_rng(pose), 1)[0]
    flat = points[:, :2] / points[:, 2:]
    flat = side * (flat - flat.mean(axis=0)) / np.ptp(flat)
    cosine, sine = np.cos(np.deg2rad(turn_deg)), np.sin(np.deg2rad(turn_deg))
    return np.asarray(flat @ np.array([[cosine, sine], [-sine, cosine]]) + at_px, np.float32)


def test_a_shape_has_no_position_size_side_or_rotation() -> None:
    hand = hand_px(0)
    mirrored = hand * [-1, 1] + [64, 0]
    others = np.stack([hand, hand_px(0, side=12, at_px=50), mirrored, hand_px(0, turn_deg=70)]).astype(np.float32)
    is_left = np.array([False, False, True, False])
    far = [distances(shapes[:1].repeat(4, axis=0), shapes) for shapes in
           (shapes_of(others, is_left), shapes_of(others, is_left, upright=0))]  # fmt: skip
    np.testing.assert_allclose(far[0][:3], 0, atol=1e-5)
    assert far[0][3] > 0.5
    np.testing.assert_allclose(far[1], 0, atol=1e-5)
    wrist = shapes_of(others, is_left, upright=0)[:, 0]
    np.testing.assert_allclose(wrist[:, 0], 0, atol=1e-5)
    assert (wrist[:, 1] > 0).all()


@given(st.data())
def test_partners_are_the_nearest_of_other_groups(data: st.DataObject) -> None:
    """Points on a grid, so that many distances are equal: the first row counts then."""
    total, count = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    points = rng.integers(0, 3, (total, 2)).astype(np.float32)
    group = rng.integers(0, data.draw(st.integers(1, 5)), total)
    found = most_similar(points, group, count)
    far = cdist(points, points)
    far[group[:, None] == group] = np.inf
    order = np.argsort(far, axis=1, kind="stable")[:, :count]
    expected = np.full((total, count), -1)
    expected[:, : order.shape[1]] = np.where(np.isfinite(np.take_along_axis(far, order, axis=1)), order, -1)
    np.testing.assert_array_equal(found.rows, expected)
    assert found.found == 1


def test_cells_find_most_of_the_nearest_and_never_one_of_the_same_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the points are in one group, so its cells hold too few others, and more cells are searched."""
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(9, 0.1, (1500, 4)), rng.normal(0, 2, (1500, 4))]).astype(np.float32)
    group = np.concatenate([np.zeros(1500, np.int64), rng.integers(1, 40, 1500)])
    exact = most_similar(points, group, 2)
    for name, value in (("EXACT_UP_TO", 100), ("PER_CELL", 60), ("PROBED", 6)):
        monkeypatch.setattr(similar, name, value)
    found = most_similar(points, group, 2)
    assert (found.rows >= 0).all()
    assert (group[found.rows] != group[:, None]).all()
    same = (found.rows[:, 0] == exact.rows[:, 0]).mean()
    assert 0.5 < same < 1
    assert abs(found.found - same) < 0.05


def write_frames(root: Path, *, folders: int = 3, each: int = POSES, twice: bool = False) -> Path:
    """Folders in which each pose is shown once, at another place and size, left hands in every other; and the boxes."""
    rows = []
    for folder in range(folders):
        for pose in range(each):
            points = hand_px(pose, side=20 + 3 * folder, at_px=28 + 4 * folder * (not twice))
            if twice:
                points = hand_px(pose)
            left = folder % 2 == 1
            shown = points * [-1, 1] + [64, 0] if left else points
            image = np.full((64, 64, 3), 60 * folder, np.uint8)
            draw_skeleton(image, shown, HAND)
            name = f"video{folder}/frame_{30 * pose:06d}.jpg"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(root / name), image[..., ::-1])
            edges = [*shown.min(axis=0), *shown.max(axis=0)]
            rows.append([name, *edges, "left" if left else "right", 0.9, *shown.ravel()])
    rows.append(["video0/frame_000000.jpg", 1, 1, 20, 20, "right", 0.9, *[""] * 42])  # a box that was added by hand
    boxes = root.parent / "boxes.csv"
    with boxes.open("w", newline="") as file:
        csv.writer(file).writerows([[*_WITH_CONFIDENCE, *_LANDMARKS], *rows])
    return boxes


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configuration of three folders of frames with boxes, in the current folder."""
    write_frames(tmp_path / "frames")
    monkeypatch.chdir(tmp_path)
    return as_options(("data.source=folder", "data.root=frames", "data.box=boxes.csv"))


def test_pairs_are_the_same_pose_in_another_video(frames: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("mine", *frames, "--count", "2", "pairs.csv") == 0
    printed = capsys.readouterr().out
    assert "36 pairs of 18 hands in 3 groups" in printed
    assert "1 hands without all their keypoints are left out" in printed
    with Path("pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        (video, frame), (other, same) = row["file"].split("/"), row["positive"].split("/")
        assert video != other
        assert frame == same
        assert row["number"] == row["positive_number"] == "0"
        assert float(row["distance"]) < 1e-3
    config = DataConfig("folder", "frames", box="boxes.csv", positive="file", pairs="pairs.csv")
    index = load_index(config)
    assert index.partners is not None
    assert index.partners.count.tolist() == [2, 0, *[2] * 17]  # the second hand of the first frame has no keypoints
    sheet = cv2.imread("pairs.png")
    assert sheet is not None
    assert sheet.std() > 10
    assert run_cli("mine", *frames, "pairs.csv") == 2
    assert "pairs.csv: exists already, and nothing is overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("hands", [3000, pytest.param(2_000_000, marks=pytest.mark.slow)])  # for a quiet machine
def test_two_million_hands_are_mined_within_half_an_hour(
    hands: int, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Poses between two of 2,000, turned in space, 1,000 of them in a video. The videos have one picture each."""
    if hands < similar.EXACT_UP_TO:
        for name, value in (("EXACT_UP_TO", 1000), ("PER_CELL", 100), ("PROBED", 8)):
            monkeypatch.setattr(similar, name, value)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    poses_m = random_hands_m(rng, 2000)
    poses_m -= poses_m.mean(axis=1, keepdims=True)
    with Path("boxes.csv").open("w", newline="") as file:
        boxes = csv.writer(file)
        boxes.writerow([*_WITH_CONFIDENCE, *_LANDMARKS])
        for video in range(hands // 1000):
            write_image(Path("frames") / f"video-{video}" / "frame_000000.jpg", 64, 64)
            first, second = rng.integers(0, len(poses_m), (2, 1000))
            share, turn = rng.random((1000, 1, 1)), Rotation.random(1000, random_state=video).as_matrix()[:, :2]
            flat_m = (share * poses_m[first] + (1 - share) * poses_m[second]) @ turn.transpose(0, 2, 1)
            points_px = (32 + 200 * flat_m).round(2)
            edges_px = np.concatenate([points_px.min(axis=1), points_px.max(axis=1)], axis=1)
            boxes.writerows(
                [f"video-{video}/frame_000000.jpg", *edges, "right", 0.9, *points]
                for edges, points in zip(edges_px.tolist(), points_px.reshape(1000, -1).tolist(), strict=True)
            )
    begin = time.monotonic()
    data = as_options(("data.source=folder", "data.root=frames", "data.box=boxes.csv"))
    assert run_cli("mine", *data, "pairs.csv") == 0
    taken_s = time.monotonic() - begin
    with Path("pairs.csv").open(newline="") as file:
        pairs = [(row["file"] == row["positive"], float(row["distance"])) for row in csv.DictReader(file)]
    in_same_file, distance = np.array(pairs).T
    assert (len(pairs), in_same_file.any()) == (hands, False)
    assert np.median(distance) < 0.3
    missed = re.search(r"([\d.]+)% of a sample", capsys.readouterr().out)  # not said if all of the sample have theirs
    found_percent = float(missed[1]) if missed else 100.0
    assert found_percent > 80
    if hands < 2_000_000:
        return
    assert taken_s < 30 * 60
    record(
        "mine", proof="the most similar hands of other videos", hands=hands, seconds=round(taken_s),
        nearest_found_percent=found_percent, median_distance=round(float(np.median(distance)), 3),
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    )  # fmt: skip


def test_versions_of_a_pose_are_not_its_positives(tmp_path: Path) -> None:
    """Of FreiHAND's layout: four partners are the four versions of the most similar other pose, at one distance."""
    tiny_hands.write_hands(tmp_path / "hands", POSES)
    out = tmp_path / "pairs.csv"
    assert (
        run_cli("mine", "--set", f"data.root={tmp_path / 'hands'}", "--group", "index", "--count", "4", str(out)) == 0
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 4 * POSES
    for start in range(0, len(rows), 4):
        four = rows[start : start + 4]
        (hand,) = {int(Path(row["file"]).stem) for row in four}
        partners = [int(Path(row["positive"]).stem) for row in four]
        assert {partner // POSES for partner in partners} == {0, 1, 2, 3}
        (pose,) = {partner % POSES for partner in partners}
        assert pose != hand % POSES
        assert len({row["distance"] for row in four}) == 1


def test_distances_tell_poses_apart(frames: list[str]) -> None:
    moved = np.zeros((1, 4, 2), np.float32)
    moved[0, 0] = 3, 4
    assert similar.distances(moved, np.zeros_like(moved)).tolist() == [2.5]
    assert run_cli("mine", *frames, "--count", "12", "pairs.csv") == 0
    with Path("pairs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            is_same = row["file"].split("/")[1] == row["positive"].split("/")[1]
            assert (float(row["distance"]) < 1e-3) == is_same


def test_a_video_that_is_there_twice_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxes = write_frames(tmp_path / "frames", folders=3, twice=True)
    settings = as_options(("data.source=folder", f"data.root={tmp_path / 'frames'}", f"data.box={boxes}"))
    assert run_cli("mine", *settings, str(tmp_path / "pairs.csv")) == 0
    assert "pairs have the same keypoints to the last digit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("pairs.txt",), "pairs.txt: expected a name that ends in .csv"),
        (("none/pairs.csv",), "none: no such folder"),
        (("frames/pairs.csv",), "frames/pairs.png is within data.root"),
        (("taken.csv",), "taken.png: exists already"),
        (("--set", "data.box=center", "pairs.csv"), "no hand has all its keypoints"),
        (("--set", "data.root=frames/video0", "--set", "data.box=one.csv", "pairs.csv"), "all 2 hands with keypoints"),
        (("--count", "0", "pairs.csv"), "--count"),
    ],
)
def test_what_cannot_be_mined_is_one_line(
    frames: list[str], arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken.png").write_bytes(b"mine")
    lines = Path("boxes.csv").read_text().splitlines()[:3]
    Path("one.csv").write_text("\n".join(lines).replace("video0/", ""))
    assert run_cli("mine", *frames, *arguments) == 2
    printed = capsys.readouterr().err
    assert line in printed
    assert "Traceback" not in printed
    assert Path("taken.png").read_bytes() == b"mine"
    assert not list(Path().glob("**/pairs.*"))

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.annotations import stored_images
from tests.command_line import run_cli
from tests.conftest import Record
from tests.pipelines.sources.layouts import hand100m_entries, one_line, write_hand100m, write_image

HANDS = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_hand100m(tmp_path / "data", hand100m_entries(HANDS))
    return tmp_path / "data"


def load(root: Path, **keys: Any) -> Index:
    return load_index(DataConfig("hand100m", str(root), **{"box_margin": 1.0, **keys}))


def partners_of(index: Index) -> list[tuple[str, str]]:
    """Names of the pairs."""
    assert index.partners is not None
    rows = np.arange(len(index))
    found = index.partners.of(rows, np.zeros(len(index)))
    return [(index.paths[row], index.paths[found[row]]) for row in rows.tolist() if found[row] != row]


def authors_crop(image: np.ndarray, box: list[int]) -> np.ndarray:
    """The crop of SiMHand's loader before it is resized, written anew: 1.3 boxes, squared, cut at the border."""
    x0, y0, x1, y1 = box
    more_x, more_y = (int((int(side * 1.3) - side) / 2) for side in (x1 - x0, y1 - y0))
    x0, y0, x1, y1 = x0 - more_x, y0 - more_y, x1 + more_x, y1 + more_y
    half = max(x1 - x0, y1 - y0) // 2
    left, top = max(0, int((x0 + x1) / 2 - half)), max(0, int((y0 + y1) / 2 - half))
    return image[top : int((y0 + y1) / 2 + half), left : int((x0 + x1) / 2 + half)]


def test_boxes_and_keypoints_are_those_of_the_authors_crops(root: Path) -> None:
    """An image of coordinates, cropped as their code does it, says where a fraction of the crop lies."""
    entries = hand100m_entries(HANDS)
    index = load(root)
    assert index.paths == [image["file_name"] for image in entries["images"]]
    assert index.mirror is not None
    assert index.mirror.tolist() == [hand["left_right"] == "Left" for hand in entries["annotations"]]
    assert index.keypoints_px is not None
    x, y = np.meshgrid(np.arange(120), np.arange(90))
    cut = 0
    for row, hand in enumerate(entries["annotations"]):
        box = [int(edge) for edge in json.loads(hand["boxes"])]
        crop = authors_crop(np.stack([x, y], axis=2), box)
        cut += crop.shape[0] != crop.shape[1]
        expected = crop[0, 0] + np.array(hand["keypoint_25d"])[:, :2] * crop.shape[1::-1]
        np.testing.assert_allclose(index.keypoints_px[row], expected, atol=1e-4)
        side = max(box[2] - box[0], box[3] - box[1])
        np.testing.assert_allclose(index.box_px[row], [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, side])
    assert 5 < cut < HANDS


def test_the_size_of_a_video_is_that_of_its_first_readable_frame(root: Path) -> None:
    whole = load(root)
    assert whole.keypoints_px is not None
    for row in range(4):
        whole.path(row).write_bytes(b"")
    again = load(root)
    np.testing.assert_array_equal(again.keypoints_px, whole.keypoints_px)
    for row in range(HANDS):  # unknown sizes cut nothing
        whole.path(row).write_bytes(b"")
    unknown = load(root).keypoints_px
    assert unknown is not None
    assert np.isfinite(unknown).all()


def test_positives_of_the_annotations_are_partners(root: Path, tmp_path: Path) -> None:
    entries = hand100m_entries(HANDS)
    names = [image["file_name"] for image in entries["images"]]
    whole = load(root, positive="file")
    assert partners_of(whole) == list(zip(names, names[1:] + names[:1], strict=True))
    entries["annotations"][0]["positive_sample"] = []
    entries["annotations"][1]["positive_sample"] = ["1"]
    entries["annotations"][2]["positive_sample"] = [9002]
    entries["annotations"][3]["positive_sample"] = [9005, 9006]
    write_hand100m(root, entries)
    changed = partners_of(load(root, positive="file"))
    assert changed[:2] == [(names[3], names[5]), (names[4], names[5])]
    assert load(root).partners is None
    (tmp_path / "pairs.csv").write_text(f"file,positive\n{names[5]},{names[9]}\n")
    assert partners_of(load(root, positive="file", pairs=str(tmp_path / "pairs.csv"))) == [(names[5], names[9])]
    near = load(root, positive="time", positive_frames=30)
    assert near.partners is not None
    assert near.partners.count.max() == 2  # the frames before and after


def test_splits_divide_the_videos_and_keep_partners_within(tmp_path: Path) -> None:
    write_hand100m(tmp_path, hand100m_entries(80, videos=40))
    whole, train = (load(tmp_path, split=split, positive="file") for split in ("all", "train"))
    val = load(tmp_path, split="val")
    assert len(whole) == len(train) + len(val)
    assert len({path.split("/")[1] for path in val.paths}) == 4
    assert not {path.split("/")[1] for path in val.paths} & {path.split("/")[1] for path in train.paths}
    assert set(partners_of(train)) == {pair for pair in partners_of(whole) if set(pair) <= set(train.paths)}
    half = load(tmp_path, label_fraction=0.5, positive="file")
    assert len(half) == 40
    assert set(partners_of(half)) < set(partners_of(whole))


def test_missing_frames_and_empty_boxes_are_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = hand100m_entries(HANDS)
    entries["annotations"][1]["boxes"] = "[5, 5, 5, 30]"
    file = write_hand100m(root, entries)
    (root / entries["images"][2]["file_name"]).unlink()
    stored = root / entries["images"][3]["file_name"]
    stored.rename(stored.with_suffix(".png"))
    index = load(root)
    assert index.paths[:2] == [entries["images"][0]["file_name"], entries["images"][3]["file_name"][:-4] + ".png"]
    assert caplog.messages == [
        f"{file}: 38 of 40 hands are used. Left out are 1 without a frame, and 1 with an empty box"
    ]


def test_check_data_pack_and_views_read_it(root: Path, tmp_path: Path) -> None:
    index = load(root)
    index.path(3).write_bytes(b"no image")
    data = ("--set", "data.source=hand100m", "--set", f"data.root={root}")
    bad = str(tmp_path / "bad.jsonl")
    assert run_cli("check-data", bad, *data) == 1
    assert len(load(root, bad_list=bad)) == HANDS - 1
    assert run_cli("pack", str(tmp_path / "shards"), *data, "--set", f"data.bad_list={bad}", "--workers", "1") == 0
    packed = load_index(DataConfig("shards", str(tmp_path / "shards"), box_margin=1.0))
    np.testing.assert_array_equal(packed.keypoints_px, load(root, bad_list=bad).keypoints_px)
    pictures = [tmp_path / f"{positive}.png" for positive in ("self", "file")]
    for picture in pictures:
        assert run_cli("views", str(picture), *data, "--set", f"data.positive={picture.stem}", "--samples", "4") == 0
    two_views, pairs = (np.asarray(cv2.imread(str(picture))) for picture in pictures)
    assert two_views.shape == pairs.shape
    assert (two_views != pairs).any()  # the same draws, of another image in every other view


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(root: Path) -> None:
        entries = hand100m_entries(4)
        change(entries)
        write_hand100m(root, {**entries, "images": []})
        (root / "annotations/Ego4D/Hand100M_Ego4D_1m_v1-1.json").write_text(json.dumps(entries))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "annotations").rename(root / "x"), r"Hand100M_Ego4D_1m_v1-1\.json: No such file"),
        (
            lambda root: (root / "Ego4D").rename(root / "frames"),
            "no frame of 40 hands exists; the first would be Ego4D",
        ),
        (broken(lambda e: e["images"].clear()), "0 images and 4 annotations"),
        (broken(lambda e: e["annotations"][3].update(image_id=1)), "annotation 3: none of the 4 images has the id 1"),
        (broken(lambda e: e["annotations"][1].update(left_right="both")), "annotation 1: left_right: Input should be"),
        (broken(lambda e: e["annotations"][1].update(boxes="[1, 2, 3]")), "annotation 1: boxes: List should have at"),
        (broken(lambda e: e["annotations"][1].update(boxes=[1, 2, 3, 4])), "annotation 1: boxes: JSON input should be"),
        (broken(lambda e: e["annotations"][1].update(boxes="[1, 2, 3, NaN]")), "annotation 1: boxes: 3: Input should"),
        (broken(lambda e: e["annotations"][1].update(hand_id="x")), "annotation 1: hand_id: Input should be"),
        (
            broken(lambda e: e["annotations"][2].update(hand_id=e["annotations"][0]["hand_id"])),
            "annotation 2: hand_id 9",
        ),
        (
            broken(lambda e: e["annotations"][2].update(keypoint_25d=[[1e38] * 3] * 21)),
            r"keypoint_25d: .*finite numbers below 1e\+06",
        ),
        (broken(lambda e: e["annotations"][2]["keypoint_25d"].pop()), "keypoint_25d: .*found 20 x 3, expected 21 x 3"),
        (broken(lambda e: e["annotations"][2].pop("positive_sample")), "annotation 2: positive_sample: Field required"),
        (broken(lambda e: e["images"][1].update(file_name="/data/a.jpg")), "image 1: file_name: .*is no name like"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(root: Path, damage: Any, message: str) -> None:
    damage(root)
    with one_line(message, root):
        load(root)


def test_keys_of_other_sources_are_refused(root: Path) -> None:
    for keys, message in (({"box": "b.csv"}, "hold the boxes"), ({"part": "evaluation"}, "have no parts")):
        with pytest.raises(UserError, match=message):
            load(root, **keys)


def test_folders_of_frames_are_listed_again_only_after_a_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Mock(side_effect=stored_images.stored_images)
    monkeypatch.setattr(stored_images, "stored_images", listed)
    monkeypatch.setattr(stored_images, "_SETTLED_NS", 3600 * 10**9)  # they have just been made: a time could stay
    paths = load(root).paths
    assert load(root).paths == paths
    assert listed.call_count == 2
    monkeypatch.setattr(stored_images, "_SETTLED_NS", 0)
    assert [load(root).paths, load(root).paths] == [paths, paths]
    assert listed.call_count == 3

    def times_ns(file: Path) -> tuple[int, int]:
        return file.stat().st_atime_ns, file.stat().st_mtime_ns

    first = root / paths[0]
    before_ns = times_ns(first.parent)
    time.sleep(0.02)  # the steps of the file system's clock
    first.rename(first.with_suffix(".png"))
    os.utime(first.parent, ns=before_ns)  # as tar and rsync do
    assert load(root).paths == [str(Path(paths[0]).with_suffix(".png")), *paths[1:]]
    first.with_suffix(".png").unlink()
    assert [load(root).paths, load(root).paths] == [paths[1:], paths[1:]]
    moved = root.rename(root.with_name("moved"))
    assert load(moved).paths == paths[1:]


LOADS = """
import json, resource, sys, time
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
times = []
for _ in range(2):
    begin = time.monotonic()
    index = load_index(DataConfig("hand100m", sys.argv[1], positive="file"))
    times.append(time.monotonic() - begin)
    print(json.dumps({
        "hands": len(index), "s": times, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "partners": int((index.partners.count > 0).sum()),
    }))
"""


def large(root: Path, hands: int, videos: int) -> None:
    """Annotations of many hands; the videos are names of one folder of frames."""
    frames = hands // videos
    write_image(root / "frames" / "frame_000000.jpg", 120, 90)
    for frame in range(1, frames):
        (root / "frames" / f"frame_{30 * frame:06d}.jpg").hardlink_to(root / "frames" / "frame_000000.jpg")
    (root / "Ego4D").mkdir()
    for video in range(videos):
        (root / "Ego4D" / f"video-{video}").symlink_to(root / "frames")
    (root / "annotations/Ego4D").mkdir(parents=True)
    pattern = [
        json.dumps({"left_right": one["left_right"], "boxes": one["boxes"], "keypoint_25d": one["keypoint_25d"]})
        for one in hand100m_entries(8, 8)["annotations"]
    ]
    with (root / "annotations/Ego4D/Hand100M_Ego4D_1m_v1-1.json").open("w") as out:
        names = (f"Ego4D/video-{hand // frames}/frame_{hand % frames * 30:06d}.jpg" for hand in range(hands))
        images = (json.dumps({"id": hand, "file_name": name}) for hand, name in enumerate(names))
        out.write('{"images": [' + ", ".join(images) + '], "annotations": [')
        for hand in range(hands):
            own = f'{{"hand_id": "{hand}", "image_id": {hand}, "positive_sample": ["{(hand + frames) % hands}"], '
            out.write((", " if hand else "") + own + pattern[hand % 8][1:])
        out.write("]}")


@pytest.mark.parametrize(
    ("hands", "videos"),
    [(1000, 10), pytest.param(1_000_000, 100, marks=pytest.mark.slow)],  # measures times, for a quiet machine
)
def test_a_million_hands_are_read_within_a_minute_and_again_within_seconds(
    hands: int, videos: int, tmp_path: Path, record: Record
) -> None:
    large(tmp_path / "data", hands, videos)
    command = [sys.executable, "-c", LOADS, str(tmp_path / "data")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [one["hands"] for one in found] == [one["partners"] for one in found] == [hands, hands]
    first_s, again_s = found[-1]["s"]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    again_s = min(again_s, *json.loads(again.stdout.splitlines()[-1])["s"])
    if hands < 1_000_000:
        return
    assert (first_s <= 60, again_s <= 2, found[-1]["peak_mb"] <= 1500) == (True, True, True), found
    record(
        "hand100m", proof="annotations of a million hands", hands=hands, videos=videos, first_s=round(first_s, 1),
        again_s=round(again_s, 2), peak_mb=round(found[-1]["peak_mb"]),
    )  # fmt: skip

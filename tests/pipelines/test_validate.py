"""Every rule finds what is wrong, in one hand as in all, and nothing in right labels."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples import rules
from peclr_dali.pipelines.samples.index import Index, project_px, squares_around
from peclr_dali.pipelines.samples.rules import find_faults, validate
from peclr_dali.skeleton import hand_rows
from tests.pipelines.sources.layouts import hand_m, one_line, write_image

COUNT = 20
SIDE_PX = 64


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Hands with all labels, and an image of each: 64 pixels wide and high."""
    for row in range(COUNT):
        write_image(tmp_path / f"{row}.png", SIDE_PX, SIDE_PX)
    xyz_m = (np.stack([hand_m(seed) for seed in range(COUNT)]) + np.array([0, 0, 0.7])).astype(np.float32)
    cameras = np.tile(np.array([[160, 0, 32], [0, 160, 32], [0, 0, 1]], np.float32), (COUNT, 1, 1))
    keypoints_px = project_px(cameras, xyz_m)
    return Index(
        name="hands",
        root=tmp_path,
        paths=[f"{row}.png" for row in range(COUNT)],
        box_px=squares_around(keypoints_px.min(axis=1), keypoints_px.max(axis=1)),
        keypoints_px=keypoints_px,
        targets={"K": cameras, "xyz_m": xyz_m, "scale_m": np.linalg.norm(xyz_m[:, 10] - xyz_m[:, 9], axis=1)},
        label_file="labels.json",
        labelled_size_px=np.full((COUNT, 2), SIDE_PX, np.float32),
        one_size=True,
    )


def changed(index: Index, rows: Sequence[int], **changes: Callable[[Any], Any]) -> Index:
    """The index with some rows of its tables changed; of other targets than the changed one, only K stays."""
    arrays, targets = dict[str, Any](), dict(index.targets)
    for name, change in changes.items():
        table = index.tables[name].copy()
        table[list(rows)] = change(table[list(rows)])
        (targets if name in targets else arrays)[name] = table
    kept = {name: table for name, table in targets.items() if name == "K" or name in changes or arrays}
    return replace(index, **arrays, targets=kept)


CASES: list[tuple[Callable[..., Any], dict[str, Callable[[Any], Any]]]] = [
    (rules.cameras_without_form, {"K": lambda cameras: cameras.swapaxes(1, 2)}),
    (rules.cameras_without_form, {"K": lambda cameras: cameras * np.nan, "xyz_m": lambda xyz_m: xyz_m}),
    (rules.cameras_without_form, {"K": lambda cameras: cameras * [[0.01], [0.01], [1]]}),
    (rules.cameras_without_form, {"K": lambda cameras: cameras * [[1], [2.5], [1]]}),
    (rules.cameras_without_form, {"K": lambda cameras: cameras * [[999], [999], [1]]}),
    (rules.cameras_without_form, {"K": lambda cameras: cameras + 300 * np.eye(3)[[2, 0, 2]] * [1, 0, 0]}),
    (rules.joints_out_of_sight, {"xyz_m": lambda xyz_m: xyz_m * 1000}),
    (rules.joints_out_of_sight, {"xyz_m": lambda xyz_m: xyz_m * [1, 1, -1]}),
    (rules.joints_of_no_hand, {"xyz_m": lambda xyz_m: xyz_m / 1000}),
    (rules.scales_of_no_bone, {"scale_m": lambda scale_m: scale_m * 1000}),
    (rules.scales_of_no_bone, {"scale_m": lambda scale_m: scale_m / 1000}),
    (rules.scales_of_no_bone, {"scale_m": lambda scale_m: scale_m * 2, "xyz_m": lambda xyz_m: xyz_m}),
    (rules.joints_of_no_hand, {"xyz_m": lambda xyz_m: xyz_m * 4}),
    (rules.joints_of_no_hand, {"xyz_m": lambda xyz_m: xyz_m / 6}),
    (rules.sizes_of_labels, {"labelled_size_px": lambda size_px: size_px * [1, 2]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, hand_rows("freihand", "mano")]}),
    (
        rules.hands_out_of_order,
        {"xyz_m": lambda xyz_m: xyz_m[:, [0, 4, 3, 2, 1, 8, 7, 6, 5, 12, 11, 10, 9, 16, 15, 14, 13, 20, 19, 18, 17]]},
    ),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, [0, *range(5, 21), *range(1, 5)]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, np.r_[:5, 17:21, 9:17, 5:9]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, np.r_[:5, 9:13, 5:9, 13:21]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, [0, 4, 3, 2, 1, *range(5, 21)]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, [0, 1, 3, 2, *range(4, 21)]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, [*range(6), 7, 6, *range(8, 21)]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, [*range(20), 19]]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m[:, np.where(np.arange(21) % 4 == 1, 5, np.arange(21))]}),
    (rules.hands_out_of_order, {"xyz_m": lambda xyz_m: xyz_m + np.eye(21)[:, 4:5] * 0.25}),
    (rules.hands_bent_back, {"xyz_m": lambda xyz_m: xyz_m[:1].repeat(len(xyz_m), 0) * [-1, 1, 1]}),
    (rules.hands_bent_back, {"xyz_m": lambda xyz_m: xyz_m[:1].repeat(len(xyz_m), 0) * [1, 1, -1] + [0, 0, 1.4]}),
    (rules.boxes_without_numbers, {"box_px": lambda box_px: box_px * np.nan}),
    (rules.boxes_without_numbers, {"box_px": lambda box_px: -box_px}),
    (rules.boxes_without_numbers, {"box_px": lambda box_px: box_px * [1, 1, 0]}),
    (rules.boxes_without_numbers, {"box_px": lambda box_px: box_px + 1e9}),
    (rules.boxes_without_pixels, {"box_px": lambda box_px: box_px / SIDE_PX}),
    (rules.boxes_beyond_images, {"box_px": lambda box_px: box_px * [2.5, 1, 1]}),
    (rules.cameras_beside_boxes, {"K": lambda cameras: cameras * [[1, 1, 30], [1, 1, 1], [1, 1, 1]]}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px + 60}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px / SIDE_PX + 0.5}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px + np.eye(21)[:, :1] * 1e30}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px / 7 + 27}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px * (np.arange(21)[:, None] > 0)}),
    (rules.keypoints_off_their_boxes, {"keypoints_px": lambda points_px: points_px * (np.arange(21)[:, None] > 3)}),
    (
        rules.keypoints_off_their_boxes,
        {"keypoints_px": lambda points_px: points_px * (1 - np.eye(21)[:, 3:4]) - 1},
    ),
    (rules.joints_apart_from_keypoints, {"keypoints_px": lambda points_px: points_px[:, [0, *range(20, 0, -1)]]}),
    (rules.joints_apart_from_keypoints, {"keypoints_px": lambda points_px: points_px + np.eye(21)[:, 12:13] * 30}),
]


@pytest.mark.parametrize(("rule", "changes"), CASES)
def test_wrong_labels_are_refused_and_a_few_counted(
    index: Index,
    rule: Callable[..., Any],
    changes: dict[str, Callable[[Any], Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = next(entry for entry in rules.RULES if entry.masks == rule)
    with one_line(rf"{COUNT} of {COUNT} {entry.found}, the first is 0\.png \(row 0; ", "labels.json", entry.expected):
        validate(changed(index, range(COUNT), **changes))
    few = changed(index, [7], **changes)
    if entry.most == 0:
        with pytest.raises(UserError, match=rf"1 of {COUNT} {entry.found}, the first is 7\.png \(row 7; "):
            validate(few)
    else:
        validate(few)
        (message, *_) = (record.message for record in caplog.records)
        assert f"1 of {COUNT} {entry.found}, the first is 7.png" in message
        assert "check-data" in message


def test_right_labels_are_no_news(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """Also without any one table, with unknown rows, and of whole images."""
    some = np.arange(COUNT) % 3 == 0
    unknown = {name: np.where(some.reshape(-1, *[1] * (table.ndim - 1)), np.nan, table).astype(np.float32)
               for name, table in index.targets.items()}  # fmt: skip
    whole = np.where(some[:, None], 0, index.box_px).astype(np.float32)
    validate(index)
    validate(replace(index, keypoints_px=None))
    validate(replace(index, targets=unknown, keypoints_px=project_px(unknown["K"], unknown["xyz_m"]), box_px=whole))
    for name in index.targets:
        validate(replace(index, targets={name: index.targets[name]}, labelled_size_px=None))
    assert not caplog.records


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("20 of 20 lengths of the .* those of the 3D joints", {"scale_m": lambda s: s * 1.1, "xyz_m": lambda m: m}),
        (
            "20 of 20 hands .* one of the joints, .* at the same place",
            {
                "xyz_m": lambda xyz_m: xyz_m - xyz_m[:, :1] + [0, 0, 0.7],
                "keypoints_px": lambda points_px: points_px * np.nan,
            },
        ),
        (
            "20 of 20 hands .* one of the joints, .* at the same place",
            {
                "xyz_m": lambda xyz_m: xyz_m - xyz_m[:, [0, 5, 9, 13, 17]].mean(axis=1, keepdims=True) + [0, 0, 0.7],
                "keypoints_px": lambda points_px: points_px * np.nan,
            },
        ),
        (
            "20 of 20 hands .* one of the joints, .* at the same place",
            {
                "xyz_m": lambda xyz_m: xyz_m - xyz_m.mean(axis=1, keepdims=True) + [0, 0, 0.7],
                "keypoints_px": lambda points_px: points_px * np.nan,
            },
        ),
        (
            "20 of 20 hands .* beside their boxes",
            {"keypoints_px": lambda points_px: 0.3 * (points_px - 32) + 44, "xyz_m": lambda xyz_m: xyz_m * np.nan},
        ),
        (
            "20 of 20 hands .* beside their boxes",
            {"keypoints_px": lambda points_px: 1.6 * points_px - 19.2, "xyz_m": lambda xyz_m: xyz_m * np.nan},
        ),
        (
            "20 of 20 boxes are in a set that is in the upper left",
            {
                "box_px": lambda box_px: box_px * 0.45,
                "keypoints_px": lambda points_px: points_px * 0.45,
                "xyz_m": lambda xyz_m: xyz_m * np.nan,
            },
        ),
        (
            "20 of 20 cameras and hands are far from the middle",
            {
                "K": lambda cameras: cameras + 4.6 * np.eye(3)[2] * [[1], [1], [0]],
                "keypoints_px": lambda points_px: points_px - points_px.mean(axis=(0, 1)) + 42,
                "xyz_m": lambda xyz_m: xyz_m * np.nan,
            },
        ),
    ],
)
def test_what_may_be_right_is_only_doubted(
    index: Index, message: str, changes: dict[str, Callable[[Any], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    validate(replace(changed(index, range(COUNT), **changes), group=np.arange(COUNT)))
    assert re.search(f"{message}.* They are used as they are$", caplog.text, re.MULTILINE)


def test_one_cropped_hand_is_in_the_middle_of_its_image(index: Index) -> None:
    """Wherever most of its joints are."""
    points_px = np.repeat([[10.0, 10.0], [54.0, 54.0]], [20, 1], axis=0)[None]
    tables = {
        "size_px": np.full((1, 2), 64.0),
        "K": index.targets["K"][:1] + 20 * np.eye(3)[2],
        "keypoints_px": points_px,
    }
    assert not rules.cameras_off_centre(tables)[1].any()
    assert rules.cameras_off_centre({**tables, "keypoints_px": points_px + 8})[1].any()


def test_left_hands_are_bent_as_their_mirror_images(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    left = replace(changed(index, range(COUNT), xyz_m=lambda xyz_m: xyz_m * [-1, 1, 1]), keypoints_px=None)
    validate(replace(left, mirror=np.ones(COUNT, bool)))
    assert not caplog.records


def test_a_box_is_not_of_both_hands(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """Of one image; the same box in another image may be."""
    first = np.arange(COUNT) // 2 * 2
    boxed = Index("boxes", index.root, index.paths, index.box_px[first], mirror=np.arange(COUNT) % 2 == 1)
    validate(replace(boxed, group=np.arange(COUNT)))
    assert not caplog.records
    with one_line(r"20 of 20 boxes are those of a right hand and of a left one, the first is 0.png .*; mirror 0\)"):
        validate(replace(boxed, group=first))


def test_keypoints_are_those_of_one_image(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    rows = np.arange(COUNT) // 5 * 5
    copies = Index("copies", index.root, index.paths, index.box_px[rows], index.tables["keypoints_px"][rows])
    validate(replace(copies, group=rows))
    assert not caplog.records
    validate(replace(copies, group=np.arange(COUNT)))
    assert "16 of 20 hands have exactly the keypoints of a hand of another image" in caplog.text
    near_px = (copies.box_px + np.arange(COUNT)[:, None] / 99).astype(np.float32)
    validate(replace(copies, box_px=near_px, group=rows, mirror=np.arange(COUNT) % 5 == 3))
    assert "4 of 20 hands have exactly the keypoints of a hand of another image, or of the other side" in caplog.text


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (range(21), 0),
        (hand_rows("freihand", "mano"), 1),
        (hand_rows("freihand", "peclr"), 1),
        ([0, *range(5, 21), *range(1, 5)], 1),
        (np.r_[:5, 9:13, 5:9, 13:21], 1),
        ([*range(4, 0, -1), *range(8, 4, -1), *range(12, 8, -1), *range(16, 12, -1), *range(20, 16, -1), 0], 1),
    ],
)
def test_keypoints_of_many_hands_are_in_order(index: Index, order: Sequence[int], found: int) -> None:
    """Also with a keypoint that is not known; not of a film, which shows one pose."""
    points_px = np.tile(index.tables["keypoints_px"], (3, 1, 1))[:, order]
    points_px[1::2, 9] = np.nan
    many = Index("2D", index.root, [*index.paths] * 3, np.tile(index.box_px, (3, 1)), points_px)
    faults = list(find_faults(many, np.full((3 * COUNT, 2), float(SIDE_PX))))
    assert [(fault.rule.masks, len(fault.rows)) for fault in faults] == found * [(rules.keypoints_out_of_order, 60)]
    film_px = points_px[:1] + np.arange(60)[:, None, None] / 60
    assert not rules.keypoints_out_of_order({"keypoints_px": film_px})[1].any()
    film_px = film_px * 0 + np.arange(60)[:, None, None] + np.arange(21)[:, None] ** 4 / 2000  # a finger points
    boxes_px = squares_around(film_px.min(axis=1), film_px.max(axis=1))
    assert not rules.keypoints_of_other_boxes({"keypoints_px": film_px, "box_px": boxes_px})[1].any()


def test_images_of_one_size_have_that_of_the_first_and_of_their_labels(
    index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    index = replace(index, labelled_size_px=None)
    write_image(index.path(5), 80, 60)
    with one_line("1 of 20 images have another size than the first, the first is 5.png .*size_px 80, 60"):
        validate(index)
    validate(replace(index, one_size=False))
    for row in range(COUNT):
        write_image(index.path(row), 160, 120)
    with one_line("20 of 20 images have another size than their labels, the first is 0.png .* 160, 120; K 160, 0, 32"):
        validate(index)
    validate(replace(index, one_size=False))  # where crops may have sizes of their own, the camera is only doubted
    assert "labels.json: 20 of 20 cameras and hands are far from the middle of their images" in caplog.text


@pytest.mark.parametrize(
    ("box_px", "found"),
    [
        ((32, 32, 40), None),
        ((-5, -5, 30), rules.boxes_in_a_corner),  # a part of it shows the image
        ((60, 60, 30), None),
        ((32, 10, 20), None),
        ((75, 75, 30), rules.boxes_beyond_images),  # as of images of another size
        ((32, 32, 900), None),
        ((6, 6, 3), rules.boxes_in_a_corner),
        ((32, 32, 1.9), rules.boxes_without_pixels),
        ((-15, 32, 30), rules.boxes_without_pixels),
        ((32, 80, 30), rules.boxes_beyond_images),
        ((0, 0, 1300), rules.boxes_beyond_images),
        ((0, 0, 1e9), rules.boxes_without_numbers),
    ],
)
def test_boxes_may_end_outside_of_their_images(
    index: Index, box_px: tuple[float, float, float], found: Callable[..., Any] | None
) -> None:
    boxes_px = np.tile(np.array(box_px, np.float32), (COUNT, 1))
    boxed = Index("boxes", index.root, index.paths, boxes_px)
    faults = [fault.rule.masks for fault in find_faults(boxed, np.full((COUNT, 2), float(SIDE_PX)))]
    assert faults[:1] == ([] if found is None else [found])


def test_each_rule_is_tested() -> None:
    others = {rules.sizes_that_differ, rules.cameras_of_other_sizes, rules.boxes_of_both_sides, rules.boxes_in_a_corner}
    others |= {rules.keypoints_of_other_images, rules.keypoints_out_of_order, rules.scales_of_other_hands}
    others |= {rules.joints_at_one_place, rules.cameras_off_centre, rules.keypoints_of_other_boxes}
    assert {rule for rule, _ in CASES} | others == {rule.masks for rule in rules.RULES}

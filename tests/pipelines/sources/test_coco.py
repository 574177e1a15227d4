from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.coco import load_coco
from peclr_dali.pipelines.sources.shards.load import load_shards
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.skeleton import BODY, HAND, THUMB_IN_ANATOMY
from tests.pipelines.sources.layouts import one_line
from tests.train import tiny_hands, tiny_people

PEOPLE = 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_people.write_people(tmp_path / "people", PEOPLE)
    return tmp_path / "people"


def changed(root: Path, entries: str = "annotations", **change: Any) -> None:
    """Set keys of the first annotation or image."""
    content = json.loads((root / "annotations.json").read_text())
    content[entries][0].update(change)
    (root / "annotations.json").write_text(json.dumps(content))


def test_people_are_as_they_were_annotated(root: Path) -> None:
    index = load_coco(DataConfig("coco", str(root)))
    content = json.loads((root / "annotations.json").read_text())
    assert index.skeleton is BODY
    assert index.keypoints_px is not None
    for row, one in enumerate(content["annotations"]):
        labels = np.array(one["keypoints"]).reshape(17, 3)
        known = labels[:, 2] > 0
        np.testing.assert_array_equal(index.keypoints_px[row, known], labels[known, :2] + 0.5)  # pixels' centres
        assert np.isnan(index.keypoints_px[row, ~known]).all()
        assert known.sum() == 16
        x, y, width, height = one["bbox"]
        np.testing.assert_allclose(index.box_px[row], [x + width / 2, y + height / 2, max(width, height)])
        assert index.path(row).is_file()
    assert index.targets == {}


def test_crowds_and_people_without_a_keypoint_are_left_out(root: Path) -> None:
    changed(root, iscrowd=1)
    assert len(load_coco(DataConfig("coco", str(root)))) == PEOPLE - 1
    changed(root, iscrowd=0, keypoints=[0] * 51)
    assert len(load_coco(DataConfig("coco", str(root)))) == PEOPLE - 1


def test_without_a_box_the_box_is_around_the_keypoints(root: Path) -> None:
    changed(root, bbox=[0, 0, 0, 0])
    index = load_coco(DataConfig("coco", str(root)))
    assert index.keypoints_px is not None
    low, high = np.nanmin(index.keypoints_px[0], axis=0), np.nanmax(index.keypoints_px[0], axis=0)
    np.testing.assert_allclose(index.box_px[0], [*(low + high) / 2, (high - low).max()])


def test_one_keypoint_without_a_box_is_no_person(root: Path) -> None:
    changed(root, bbox=[0, 0, 0, 0], keypoints=[10, 20, 2] + [0] * 48)
    index = load_coco(DataConfig("coco", str(root)))
    assert len(index) == PEOPLE - 1
    assert (index.box_px[:, 2] > 0).all()


def test_the_parts_share_no_image(root: Path) -> None:
    changed(root, image_id=105)  # two people in one image
    train, val, both = (load_coco(DataConfig("coco", str(root), split=split)) for split in ("train", "val", "all"))
    assert not {*train.paths} & {*val.paths}
    assert sorted([*train.paths, *val.paths]) == sorted(both.paths)
    assert len({*val.paths}) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"part": "evaluation"}, r"data\.part = 'evaluation': .*have no parts"),  # it would be all images
        ({"box": "boxes.csv"}, r"data.box = 'boxes.csv': COCO's annotations hold the boxes. Leave it out"),
    ],
)
def test_keys_without_a_meaning_are_refused(root: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_index(DataConfig(source="coco", root=str(root), **keys))


def test_the_file_may_lie_elsewhere(root: Path) -> None:
    moved = root.parent / "elsewhere.json"
    (root / "annotations.json").rename(moved)
    for name in (str(moved), "../elsewhere.json"):
        found = load_index(DataConfig(source="coco", root=str(root), annotations=name, box_margin=1.5))
        assert len(found) == PEOPLE


def test_shards_keep_the_skeleton(root: Path, tmp_path: Path) -> None:
    index = load_coco(DataConfig("coco", str(root)))
    pack(index, tmp_path / "shards", per_shard=8, workers=1)
    packed = load_shards(DataConfig("shards", str(tmp_path / "shards")))
    assert packed.skeleton is BODY
    np.testing.assert_array_equal(packed.keypoints_px, index.keypoints_px)
    tiny_hands.write_hands(tmp_path / "hands", 2)
    pack(load_index(DataConfig(root=str(tmp_path / "hands"))), tmp_path / "hand_shards", per_shard=8, workers=1)
    assert json.loads((tmp_path / "hand_shards" / "index.json").read_text())["skeleton"] == "hand"
    assert load_shards(DataConfig("shards", str(tmp_path / "hand_shards"))).skeleton is HAND


def test_names_of_the_thumb_are_ours_or_those_of_anatomy(root: Path) -> None:
    hand = [{"keypoints": [THUMB_IN_ANATOMY.get(name, name) for name in HAND.keypoints]}]
    points = {"keypoints": [5, 5, 2] * len(HAND)}
    content = json.loads((root / "annotations.json").read_text())
    content |= {"categories": hand, "annotations": [{**one, **points} for one in content["annotations"]]}
    (root / "annotations.json").write_text(json.dumps(content))
    assert load_coco(DataConfig("coco", str(root))).skeleton is HAND


def test_the_page_names_all_keypoints() -> None:
    page = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
    names = [*BODY.keypoints, *HAND.keypoints, *THUMB_IN_ANATOMY.values()]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; expected keypoints in COCO's JSON format. Check data.root"),
        ("{", "cannot be read .*; expected keypoints in COCO's JSON format.* mend the file"),
        ("[]", "TypeError.*; expected keypoints in COCO's JSON format"),
        ('{"images": [], "annotations": []}', "KeyError.'categories'"),
        ('{"categories": [{"keypoints": ["nose"]}]}', r"have the keypoints \[\('nose',\)\]; expected one category"),
        (
            '{"categories": [{"keypoints": ["nose"]}]}',
            "of a body in this order: nose, .*, right_ankle. Rename",
        ),
        (
            json.dumps({"categories": [{"keypoints": list(HAND.keypoints[::-1])}]}),
            "of a hand in this order: wrist, thumb_mcp, .* little_tip. Rename or reorder them",
        ),
    ],
)
def test_files_in_another_format_end_in_one_line(text: str | None, message: str, root: Path) -> None:
    file = root / "annotations.json"
    file.unlink() if text is None else file.write_text(text)
    with one_line(message, file):
        load_coco(DataConfig("coco", str(root)))


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        ("annotations", {"keypoints": [1, 2, 2]}, "expected 51 numbers in keypoints and 4 in bbox"),
        ("annotations", {"keypoints": ["a", "b", 2] * 17}, "expected 51 numbers"),
        ("annotations", {"bbox": [1, 2]}, "expected 51 numbers in keypoints and 4 in bbox"),
        ("annotations", {"image_id": "none"}, "KeyError.'none'.*; expected keypoints in COCO's JSON format"),
        ("annotations", {"keypoints": None}, "TypeError.*; expected keypoints in COCO's JSON format"),
        ("images", {"file_name": "a\0b.jpg"}, "expected keypoints in COCO's JSON format"),
        ("images", {"file_name": "a\ud800.jpg"}, "expected keypoints in COCO's JSON format"),
    ],
)
def test_a_wrong_entry_ends_in_one_line(entries: str, change: dict[str, Any], message: str, root: Path) -> None:
    changed(root, entries, **change)
    with one_line(message, root / "annotations.json"):
        load_coco(DataConfig("coco", str(root)))

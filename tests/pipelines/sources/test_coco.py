import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.coco import ANNOTATIONS, load_coco
from peclr_dali.skeleton import HAND, THUMB_IN_ANATOMY
from tests.pipelines.sources.layouts import assert_refused, write_image

HANDS = 20


def write_coco(root: Path) -> None:
    """Pictures with a hand each, in COCO's JSON format; the hand's first keypoint is unknown in one half of them."""
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for number in range(HANDS):
        name = f"images/{number:03}.jpg"
        write_image(root / name, 64, 48)
        points = np.column_stack([rng.integers(0, (64, 48), (len(HAND), 2)), 1 + np.arange(len(HAND)) % 2])
        points[0] *= number % 2
        low, high = points[1:, :2].min(axis=0), points[1:, :2].max(axis=0)
        images.append({"id": 100 + number, "file_name": name})
        box = [*low.tolist(), *(high - low).tolist()]
        annotations.append({"image_id": 100 + number, "keypoints": points.ravel().tolist(), "bbox": box})
    categories = [{"id": 1, "name": "hand", "keypoints": list(HAND.keypoints)}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations.json").write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_coco(tmp_path / "hands")
    return tmp_path / "hands"


def changed(root: Path, entries: str = "annotations", **change: Any) -> None:
    """Set keys of the first annotation or image."""
    content = json.loads((root / "annotations.json").read_text())
    content[entries][0].update(change)
    (root / "annotations.json").write_text(json.dumps(content))


def test_hands_are_as_they_were_annotated(root: Path) -> None:
    index = load_coco(DataConfig("coco", str(root)))
    for row, one in enumerate(json.loads((root / "annotations.json").read_text())["annotations"]):
        labels = np.array(one["keypoints"]).reshape(21, 3)
        known = labels[:, 2] > 0
        np.testing.assert_array_equal(
            index.tables["keypoints_px"][row, known], labels[known, :2] + 0.5
        )  # pixels' centres
        assert np.isnan(index.tables["keypoints_px"][row, ~known]).all()
        assert known.sum() == 20 + row % 2
        x, y, width, height = one["bbox"]
        np.testing.assert_allclose(index.box_px[row], [x + width / 2, y + height / 2, max(width, height)])
        assert index.path(row).is_file()
    assert index.targets == {}


def test_an_annotation_that_comes_twice_counts_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads((root / "annotations.json").read_text())
    content["annotations"][5:5] = [{"id": 9, "area": 4, **content["annotations"][3]}, content["annotations"][4]]
    (root / "annotations.json").write_text(json.dumps(content))
    assert len(load_coco(DataConfig("coco", str(root)))) == HANDS
    assert f"{root / 'annotations.json'}: 2 annotations repeat others, and are left out" in caplog.messages


def test_crowds_and_hands_without_a_keypoint_or_a_size_are_left_out(root: Path) -> None:
    for change, count in (
        ({"iscrowd": "1"}, HANDS - 1),
        ({"iscrowd": "0"}, HANDS),
        ({"keypoints": [10, 20, 2] + [0] * 60}, HANDS),
        ({"bbox": [0, 0, 0, 0]}, HANDS - 1),  # one keypoint does not say how large a hand is
        ({"keypoints": [0] * 63}, HANDS - 1),
    ):
        changed(root, **change)
        assert len(load_coco(DataConfig("coco", str(root)))) == count


def test_without_a_box_the_box_is_around_the_keypoints(root: Path) -> None:
    changed(root, bbox=[0, 0, 0, 0])
    index = load_coco(DataConfig("coco", str(root)))
    keypoints_px = index.tables["keypoints_px"][0]
    low, high = np.nanmin(keypoints_px, axis=0), np.nanmax(keypoints_px, axis=0)
    np.testing.assert_allclose(index.box_px[0], [*(low + high) / 2, (high - low).max()])


def test_the_parts_share_no_image_whatever_its_number_and_place(root: Path) -> None:
    """Else a network would be measured on images that it was trained on."""
    changed(root, image_id=105)  # two hands in one image
    train, val, both = (
        load_coco(DataConfig("coco", str(root), split=split)).paths for split in ("train", "val", "all")
    )
    assert not {*train} & {*val}
    assert sorted([*train, *val]) == sorted(both)
    assert len({*val}) == 4  # a fifth
    content = json.loads((root / ANNOTATIONS).read_text())
    for one in (*content["images"], *content["annotations"]):
        key = "id" if "id" in one else "image_id"
        one[key] = 1000 - one[key]
    content["images"].reverse()
    content["annotations"].reverse()
    (root / ANNOTATIONS).write_text(json.dumps(content))
    assert {*load_coco(DataConfig("coco", str(root), split="val")).paths} == {*val}


def test_keys_without_a_meaning_are_refused(root: Path) -> None:
    # it would be all images
    assert_refused(DataConfig("coco", str(root), part="evaluation"), r"data\.part = 'evaluation': .*have no parts")
    assert_refused(
        DataConfig("coco", str(root), box="boxes.csv"),
        r"data.box = 'boxes.csv': COCO's annotations hold the boxes. Leave it out",
    )


def test_the_file_may_lie_elsewhere(root: Path) -> None:
    moved = root.parent / "elsewhere.json"
    (root / "annotations.json").rename(moved)
    for name in (str(moved), "../elsewhere.json"):
        assert len(load_index(DataConfig(source="coco", root=str(root), annotations=name))) == HANDS
    assert_refused(
        DataConfig("coco", str(root.parent), annotations="elsewhere.json"),
        "there is no image 'images/000.jpg' in .*, nor another; expected names relative to it",
    )


def test_names_are_those_of_anatomy_or_ours_and_of_any_form_of_unicode(root: Path) -> None:
    """With a byte order mark before all."""
    hand = [{"keypoints": [THUMB_IN_ANATOMY.get(name, name) for name in HAND.keypoints]}, {"name": "cup"}]
    content = json.loads((root / "annotations.json").read_text()) | {"categories": hand}
    content["images"][3]["file_name"] = "images/h\u00e4nde.jpg"
    (root / "images/003.jpg").rename(root / "images/ha\u0308nde.jpg")
    (root / "annotations.json").write_text("\ufeff" + json.dumps(content))
    index = load_coco(DataConfig("coco", str(root)))
    assert len(index) == HANDS
    assert index.path(3).is_file()


def test_categories_have_orders_and_names_of_their_own_and_left_hands_are_mirrored(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As CVAT exports two skeletons; one with MMPose's names here, in any order, beside a category without any."""
    expected = load_coco(DataConfig("coco", str(root))).tables["keypoints_px"]
    fingers = ("Thumb", "Forefinger", "Middle_finger", "Ring_finger", "Pinky_finger")
    names = ["WRIST", *(f"{finger}{number}" for finger in fingers for number in (1, 2, 3, 4))]
    order = np.random.default_rng(1).permutation(len(HAND))
    content = json.loads((root / ANNOTATIONS).read_text())
    content["categories"] = [
        {"id": 1, "name": "Left_hand", "keypoints": HAND.keypoints},
        {"id": 2, "name": "cup", "keypoints": []},
        {"id": 3, "name": "right_hand", "keypoints": [names[row] for row in order]},
    ]
    for row, one in enumerate(content["annotations"]):
        one["category_id"] = 1 if row < 5 else 3
    (root / ANNOTATIONS).write_text(json.dumps(content))
    index = load_coco(DataConfig("coco", str(root)))
    np.testing.assert_array_equal(index.tables["keypoints_px"][5:], expected[5:, np.argsort(order)])
    assert index.mirrored.tolist() == [True] * 5 + [False] * 15
    assert "WARNING" not in caplog.text
    content["categories"][0]["name"] = "hand_L"
    (root / ANNOTATIONS).write_text(json.dumps(content))
    assert not load_coco(DataConfig("coco", str(root))).mirrored.any()
    assert "no category is named left, so all hands are right ones; but there are several" in caplog.text
    changed(root, category_id=2)
    assert_refused(DataConfig("coco", str(root)), "the name of a category is 'cup', others say hand, left or right")


def test_corners_in_place_of_width_and_height_end_in_one_line(root: Path) -> None:
    content = json.loads((root / "annotations.json").read_text())
    for one in content["annotations"]:
        x, y, width, height = one["bbox"]
        one["bbox"] = [x, y, x + width, y + height]
    (root / "annotations.json").write_text(json.dumps(content))
    assert_refused(
        DataConfig("coco", str(root)),
        "most boxes end outside of their images; expected bbox as x, y, width, height.* before EXIF turned the images",
        root,
    )


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        (
            "annotations",
            {"iscrowd": 0},
            "annotations.json: 20 hands, 0 of them left, in 20 of 20 images; 20 annotations",
        ),
        ("images", {"file_name": "./images/001.jpg"}, "several of its 20 images have the same file_name"),
        ("categories", {"supercategory": "left"}, "or 'left' stands elsewhere in the file"),
        ("annotations", {"attributes": {"side": "Left"}}, "no category is named left, so all hands are right ones"),
        ("annotations", {"keypoints": [9, 9, 0] * 3 + [9, 9, 2] * 18}, "3 keypoints have v = 0 and a place, or"),
        ("annotations", {"keypoints": [9, 9, -0.2] * 4 + [9, 9, 1] * 17}, "4 keypoints have v = 0 and a place, or"),
    ],
)
def test_a_doubtful_entry_is_warned_of(
    entries: str, change: dict[str, Any], message: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changed(root, entries, **change)
    assert len(load_coco(DataConfig("coco", str(root)))) == HANDS
    assert message in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; expected keypoints in COCO's JSON format. Check data.root"),
        ('{"images": [1], "images": []}', r"cannot be read \(a key comes twice among \['images', 'images'\]\)"),
        ("{", "cannot be read .*; expected keypoints in COCO's JSON format.* mend the file"),
        ("[]", "a list, object.* of another.*; expected keypoints in COCO's JSON format"),
        (
            json.dumps({"images": [], "annotations": [], "categories": [{"keypoints": HAND.keypoints}]}),
            "no annotation has a keypoint with v > 0; expected hands",
        ),
        (
            '{"categories": [{"keypoints": ["nose"]}]}',
            r"have the keypoints \[\['nose'\]\]; expected those of a hand in each",
        ),
    ],
)
def test_files_in_another_format_end_in_one_line(text: str | None, message: str, root: Path) -> None:
    file = root / "annotations.json"
    file.unlink() if text is None else file.write_text(text)
    assert_refused(DataConfig("coco", str(root)), message, file)


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        (
            "annotations",
            {"keypoints": [1, 2, 2]},
            "annotation 0: keypoints are .*; expected 63 finite numbers, and 4 in bbox",
        ),
        (
            "categories",
            {"name": "hand (Right or left)"},
            r"is 'hand \(Right or left\)', with left and right; expected one",
        ),
        ("annotations", {"category_id": 9}, "annotation 0: none of the 1 categories of hands has the id '9'"),
        ("annotations", {"bbox": [1, 2, np.inf, 4]}, r"annotation 0: .* bbox \[1, 2, inf, 4\]; .* finite numbers"),
        ("annotations", {"keypoints": [1e300] * 63}, "annotation 0: keypoints are .*; expected 63 finite numbers"),
        ("annotations", {"bbox": [1, 2]}, r"annotation 0: keypoints are .*, bbox \[1, 2\]; expected 63 finite"),
        ("annotations", {"bbox": [9, 9, -4, 4]}, r"annotation 0: .* bbox \[9, 9, -4, 4\]; .* x, y, width, height"),
        ("annotations", {"bbox": [1, 2, True, 4]}, "annotation 0 has true or false in place of a number"),
        ("annotations", {"keypoints": [1, 2, True] * 21}, "annotation 0 has true or false in place of a number"),
        ("annotations", {"image_id": 9}, "annotation 0: none of the 20 images has the id '9'"),
        ("annotations", {"keypoints": None}, "annotation 0: keypoints are None, bbox .*; expected 63"),
        (
            "images",
            {"file_name": None},
            "'None' cannot be the name of a file.; expected keypoints in",
        ),
        ("images", {"file_name": "./"}, "'./' cannot be the name of a file"),
        ("images", {"file_name": "a\0b.jpg"}, "expected keypoints in COCO's JSON format"),
        ("images", {"width": "wide", "height": 48}, "width and height of an image are .'wide', 48"),
        (
            "images",
            {"width": 128, "height": 96},
            "1 of 1 images have another size than their labels say.*000.jpg .* 64, 48; labelled_size_px 128, 96",
        ),
    ],
)
def test_a_wrong_entry_ends_in_one_line(entries: str, change: dict[str, Any], message: str, root: Path) -> None:
    changed(root, entries, **change)
    assert_refused(DataConfig("coco", str(root)), message, root / "annotations.json")


def test_sizes_before_exif_turned_the_images_end_in_one_line(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The labels are of the pixels as stored, then, and boxes show other parts of the images.

    Else a line says what labels are taken for: sizes are as they were where EXIF turns by 180 degrees.
    """
    caplog.set_level("INFO")
    content = json.loads((root / "annotations.json").read_text())
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for image in content["images"]:
        Image.new("RGB", (64, 48)).save(root / image["file_name"], exif=exif)
        image.update(width=64, height=48)
    (root / "annotations.json").write_text(json.dumps(content))
    assert_refused(
        DataConfig("coco", str(root)),
        "20 of 20 images have another size .* 48, 64; labelled_size_px 64, 48.*before EXIF turned",
        root,
    )
    for image in content["images"]:
        image.update(width=48, height=64)
    (root / "annotations.json").write_text(json.dumps(content))
    load_index(DataConfig("coco", str(root)))
    assert "EXIF turns 20 of 20 images that were looked at; boxes and labels must belong to the turned" in caplog.text

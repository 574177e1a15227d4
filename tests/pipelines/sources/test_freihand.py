import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.freihand import _read_labels, load_freihand
from tests.pipelines.sources.layouts import assert_refused, hand_m, write_boxes, write_coco_boxes, write_image

POSES = 20
EVALUATION = 3
WIDTH, HEIGHT = 40, 30
K = np.array([[60.0, 0, 20], [0, 54, 15], [0, 0, 1]])


def xyz_of(pose: int) -> np.ndarray:
    joints_m = hand_m(pose)
    return np.asarray(joints_m * scale_of(pose) / np.linalg.norm(joints_m[10] - joints_m[9]) + [0, 0, 0.6])


def scale_of(pose: int) -> float:
    return 0.02 + pose / 1000


def write_part(root: Path, part: str, poses: int, images: int) -> None:
    for image in range(images):
        write_image(root / part / "rgb" / f"{image:08d}.jpg", WIDTH, HEIGHT)
    labels = {
        "K": [(K + np.diag([2, 1, 0]) * pose).tolist() for pose in range(poses)],
        "xyz": [xyz_of(pose).tolist() for pose in range(poses)],
        "scale": [scale_of(pose) for pose in range(poses)],
    }
    for name, rows in labels.items():
        (root / f"{part}_{name}.json").write_text(json.dumps(rows))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_part(tmp_path, "training", POSES, 4 * POSES)
    write_part(tmp_path, "evaluation", EVALUATION, EVALUATION)
    return tmp_path


def remove_labels(root: Path, *names: str) -> None:
    for name in names:
        (root / f"training_{name}.json").unlink()


def pose_of(path: str) -> int:
    return int(Path(path).stem) % POSES


def test_training_part(root: Path) -> None:
    for name in ("._00000000.jpg", ".DS_Store", "Thumbs.db"):  # no images, but files of the system
        (root / "training/rgb" / name).write_bytes(b"x")
    index = load_freihand(DataConfig("freihand", str(root)))
    assert index.paths == [f"training/rgb/{image:08d}.jpg" for image in range(4 * POSES)]
    assert index.path(7).is_file()
    assert index.box_px.tolist() == [[20, 15, 18]] * (4 * POSES)
    np.testing.assert_allclose(load_index(DataConfig(root=str(root))).box_px[0], [20, 15, 27])
    shapes = {name: rows.shape for name, rows in index.targets.items()}
    assert shapes == {"K": (80, 3, 3), "xyz_m": (80, 21, 3), "scale_m": (80,)}
    assert all(rows.dtype == np.float32 for rows in index.targets.values())
    np.testing.assert_allclose(index.targets["xyz_m"][3 * POSES + 5], xyz_of(5), rtol=1e-6)
    np.testing.assert_allclose(index.targets["scale_m"][2 * POSES + 5], 0.025, rtol=1e-6)
    x, y, z = xyz_of(5)[9]
    np.testing.assert_allclose(
        index.tables["keypoints_px"][POSES + 5, 9], [70 * x / z + 20, 59 * y / z + 15], rtol=1e-5
    )


def test_evaluation_part_has_one_image_a_pose(root: Path) -> None:
    index = load_freihand(DataConfig("freihand", str(root), part="evaluation"))
    assert index.paths == [f"evaluation/rgb/{image:08d}.jpg" for image in range(EVALUATION)]
    (root / "evaluation_xyz.json").unlink()  # as in the first release
    index = load_freihand(DataConfig("freihand", str(root), part="evaluation"))
    assert index.keypoints_px is None
    assert set(index.targets) == {"K", "scale_m"}


def test_versions_are_chosen_by_name_in_the_order_given(root: Path) -> None:
    index = load_freihand(DataConfig("freihand", str(root), versions=("sample", "gs")))
    assert index.paths[0] == f"training/rgb/{2 * POSES:08d}.jpg"
    assert index.paths[POSES] == "training/rgb/00000000.jpg"
    assert len(index) == 2 * POSES
    np.testing.assert_array_equal(index.targets["scale_m"][:POSES], index.targets["scale_m"][POSES:])


def test_split_is_nine_to_one_and_keeps_versions_together(root: Path) -> None:
    train, val = (
        load_freihand(DataConfig("freihand", str(root), split="train")),
        load_freihand(DataConfig("freihand", str(root), split="val")),
    )
    assert (len(train), len(val)) == (72, 8)
    assert sorted([*train.paths, *val.paths]) == load_freihand(DataConfig("freihand", str(root))).paths
    poses = [pose_of(path) for path in val.paths]
    assert poses == poses[:2] * 4
    assert not set(poses) & {pose_of(path) for path in train.paths}
    np.testing.assert_allclose(val.targets["scale_m"], 0.02 + np.array(poses) / 1000, rtol=1e-6)
    assert poses[:2] == [2, 4]  # golden: a published split must never move


def test_center_box_needs_no_labels(root: Path) -> None:
    remove_labels(root, "K", "xyz", "scale")
    index = load_freihand(DataConfig("freihand", str(root), center_frac=1.0))
    assert len(index) == 4 * POSES
    assert index.box_px[-1].tolist() == [20, 15, 30]
    assert index.keypoints_px is None
    assert index.targets == {}


def test_joints_box_is_the_square_around_them(root: Path) -> None:
    index = load_freihand(DataConfig("freihand", str(root), box="joints"))
    keypoints_px = index.tables["keypoints_px"]
    low, high = keypoints_px.min(axis=1), keypoints_px.max(axis=1)
    np.testing.assert_allclose(index.box_px[:, :2], (low + high) / 2, rtol=1e-5)
    np.testing.assert_allclose(index.box_px[:, 2], (high - low).max(axis=1), rtol=1e-4)


def test_boxes_of_a_file_fit_every_subset(root: Path) -> None:
    boxes = root / "boxes.csv"
    paths = load_freihand(DataConfig("freihand", str(root))).paths
    write_boxes(boxes, {path: [image, 0, image + 8, 6] for image, path in enumerate(paths)})
    index = load_freihand(DataConfig("freihand", str(root), box=str(boxes), split="val", versions=("hom",)))
    assert index.box_px[:, 0].tolist() == [int(Path(path).stem) + 4 for path in index.paths]
    write_coco_boxes(root / "boxes.json", [paths[40]], 2 * WIDTH, 2 * HEIGHT)
    assert_refused(
        DataConfig("freihand", str(root), box=str(root / "boxes.json")),
        "boxes.json: 1 of 1 images have another size .*row 40; size_px 40, 30; labelled_size_px 80, 60",
    )
    write_coco_boxes(root / "boxes.json", paths[::2], WIDTH, HEIGHT, corner_px=5)
    assert_refused(DataConfig("freihand", str(root), box=str(root / "boxes.json")), "Are these the corners x0, y0")


def rewrite(name: str, change: Any) -> Any:
    def damage(root: Path) -> None:
        file = root / f"training_{name}.json"
        changed = change(np.array(json.loads(file.read_text())))
        file.write_text(changed if isinstance(changed, str) else json.dumps(changed.tolist()))

    return damage


def delete_images(*images: int) -> Any:
    return lambda root: [(root / "training/rgb" / f"{image:08d}.jpg").unlink() for image in images]


def delete_labels_and_last_image(root: Path) -> None:
    remove_labels(root, "K", "xyz", "scale")
    delete_images(79)(root)


def resize_images(width: int, height: int, images: Iterable[int] = range(4 * POSES)) -> Any:
    def damage(root: Path) -> None:
        for image in images:
            write_image(root / f"training/rgb/{image:08d}.jpg", width, height)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewrite("xyz", lambda rows: rows[1:]),
            r"training_xyz\.json: labels for 19 poses, but .*rgb has 80 images; expected 4 for each pose, 76",
        ),
        (
            rewrite("K", lambda rows: "{}"),
            r"training_K\.json: cannot be read .*; expected a JSON list with 3 x 3 finite",
        ),
        (rewrite("scale", lambda rows: rows[:, None].repeat(2, 1)), r"training_scale\.json: .* with one finite number"),
        (
            lambda root: (root / "training/rgb/00000003 (1).jpg").write_bytes(b""),
            r"00000080.jpg is missing, and others such as '00000003 \(1\).jpg' are there",
        ),
        (delete_images(5), r"79 \.jpg files, but 00000005\.jpg is missing"),
        (delete_labels_and_last_image, "79 images; expected a multiple of 4"),
        (lambda root: (root / "training").rename(root / "train"), r"training/rgb: No such file.*make-data"),
        (lambda root: (root / "training/rgb/00000000.jpg").write_bytes(b"x"), r"00000000\.jpg: not a readable image"),
        (rewrite("K", lambda rows: rows.transpose(0, 2, 1)), r"training_\*.json: 80 of 80 .* no valid camera matrix K"),
        (
            rewrite("xyz", lambda rows: rows * [1, 1, -1]),
            r"training_\*.json: 80 of 80 hands have joints behind the cam",
        ),
        (
            rewrite("scale", lambda rows: rows * (1 + np.eye(20)[3])),
            "4 of 80 lengths .* first is .*00000003.jpg .row 3",
        ),
        (resize_images(20, 15), r"another size than their labels, the first is .*00000000.jpg .* 20, 15; K 60, 0, 20"),
        (resize_images(80, 60, images=[40]), r"1 of 64 images have another size than the first, .*00000040.jpg"),
        (resize_images(80, 60), "64 of 64 images have another size than their labels"),
    ],
)
def test_a_set_that_does_not_fit_ends_in_one_line(root: Path, damage: Any, message: str) -> None:
    damage(root)
    assert_refused(DataConfig("freihand", str(root)), message, root)


def test_the_first_quarter_of_the_published_images_is_not_four_versions(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peclr_dali.pipelines.sources.freihand._POSES", 4 * POSES)
    assert len(load_freihand(DataConfig("freihand", str(root)))) == 4 * POSES  # its labels say so
    remove_labels(root, "K", "xyz", "scale")
    assert_refused(
        DataConfig("freihand", str(root)),
        "80 images; expected a multiple of 4, one for each version of a pose: all 320 of FreiHAND's 80",
    )
    monkeypatch.setattr("peclr_dali.pipelines.sources.freihand._POSES", 3 * POSES)
    assert_refused(
        DataConfig("freihand", str(root), positive="version"),
        "80 images; expected .*or label files, which say how many poses",
    )


def test_crops_and_whole_cameras_keep_their_labels(root: Path) -> None:
    """A crop has the hand in its middle, and the image of a whole camera the camera's centre."""
    whole_cameras = json.loads((root / "training_K.json").read_text())
    rewrite("K", lambda rows: np.add(rows, [[0, 0, 20], [0, 0, 20], [0, 0, 0]]))(root)
    assert_refused(DataConfig("freihand", str(root)), "another size than their labels")
    rewrite("xyz", lambda rows: rows - rows[..., 2:] * [0.3, 0.35, 0])(root)  # about 20 pixels
    assert len(load_index(DataConfig("freihand", str(root)))) == 4 * POSES
    rewrite("xyz", lambda rows: rows + rows[..., 2:] * [0.15, 0.17, 0])(root)
    (root / "training_K.json").write_text(json.dumps(whole_cameras))
    assert len(load_index(DataConfig("freihand", str(root), box="joints"))) == 4 * POSES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "evaluation", "split": "val"}, "evaluation images are not split"),
        ({"versions": ("gs", "gs")}, "each once"),
        ({"versions": ()}, "expected some of"),
        ({"box": "centre"}, "expected a .csv or .json file of boxes, or 'center'"),
        ({"box": "joints"}, r"training_K\.json and training_xyz\.json.*box 'center'"),
    ],
)
def test_wrong_choices_are_named(root: Path, options: dict[str, Any], message: str) -> None:
    remove_labels(root, "K")
    assert_refused(DataConfig("freihand", str(root), **options), message)


def test_arrays_are_read_as_the_json_module_reads_them(root: Path) -> None:
    rng = np.random.default_rng(0)
    rows = (0.5 + rng.random(size=(POSES, 21, 3)) * 10.0 ** rng.integers(-9, 1, (POSES, 21, 3))).tolist()
    remove_labels(root, "scale")
    rows[0][0] = [0, -0.0, 1e-9]
    rows[0][0][2] = 1.0000000000000002
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\ufeff" + json.dumps(rows, separators=(",", ":"))):
        (root / "training_xyz.json").write_text(text)
        np.testing.assert_array_equal(_read_labels(root, "training", 4 * POSES, 4)["xyz"], np.array(rows))


@pytest.mark.parametrize(
    "text", ["", "[]", "[[1, 2, 3], [4, 5]]", "[[1, 2, null]]", "[[1, 2, NaN]]", f"[1{'0' * 400}, 2]", "[" * 100_000]
)
def test_json_other_than_a_list_of_equal_arrays_is_refused(root: Path, text: str) -> None:
    (root / "training_xyz.json").write_text(text)
    assert_refused(DataConfig("freihand", str(root)), r"training_xyz\.json: ")


@pytest.mark.parametrize("number", ["true", "false", '"0.03"'])
def test_truths_and_texts_are_no_numbers(root: Path, number: str) -> None:
    rewrite("scale", lambda rows: json.dumps(rows.tolist()).replace("0.03,", f"{number},"))(root)
    assert_refused(DataConfig("freihand", str(root)), r"training_scale\.json: .*values that are no numbers")


def test_the_index_opens_few_images(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes its time per file, on a network file system above all."""
    looked_at, real = list[str](), os.stat

    def counted(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        looked_at.append(str(path))
        return real(path, *arguments, **options)

    listening = [True]
    sys.addaudithook(lambda event, given: looked_at.append(str(given[0])) if event == "open" and listening else None)
    monkeypatch.setattr(os, "stat", counted)  # under every way of asking whether a file is there
    load_index(DataConfig(root=str(root)))
    listening.clear()  # there is no way to take the hook away
    assert any(name.endswith("training_K.json") for name in looked_at)
    assert sum(name.endswith(".jpg") for name in looked_at) <= 65  # the first, and 64 whose boxes are checked

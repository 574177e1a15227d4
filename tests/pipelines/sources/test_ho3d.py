import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.ho3d import load_ho3d
from peclr_dali.skeleton import hand_rows
from tests.pipelines.sources.layouts import (
    HO3D_K,
    assert_refused,
    ho3d_joints,
    ho3d_meta,
    python2_pickle,
    write_boxes,
    write_coco_boxes,
    write_ho3d,
    write_image,
)

SEQUENCES = {"ABF10": 3, "ABF11": 3, "MC1": 2, "MC2": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "ho3d"
    write_ho3d(root, "train", SEQUENCES)
    write_ho3d(root, "evaluation", {"SM1": 2, "AP10": 2})
    return root


def camera_frame(joints: np.ndarray) -> np.ndarray:
    """By the definition: OpenGL's y and z the other way, MANO's order by name."""
    return np.asarray((joints * [1, -1, -1])[hand_rows("mano", "freihand")])


def projected(xyz_m: np.ndarray) -> np.ndarray:
    x, y, z = xyz_m.T
    return np.stack([310 * x / z + 160.5, 312 * y / z + 119.25], axis=1)


def test_training_part(root: Path) -> None:
    index = load_ho3d(DataConfig("ho3d", str(root)))
    assert len(index) == 10
    assert index.paths[:4] == [f"train/ABF10/rgb/{frame:04d}.png" for frame in range(3)] + ["train/ABF11/rgb/0000.png"]
    assert all(index.path(row).is_file() for row in range(10))
    assert index.mirror is None
    assert all(index.tables[name].dtype == np.float32 for name in ("keypoints_px", *index.targets))
    for row, seed in ((0, 0), (4, 101), (9, 301)):
        xyz_m = camera_frame(ho3d_joints(seed))
        assert (xyz_m[:, 2] > 0).all()
        np.testing.assert_allclose(index.targets["xyz_m"][row], xyz_m, rtol=1e-5)
        np.testing.assert_allclose(index.targets["K"][row], HO3D_K)
        np.testing.assert_allclose(index.targets["scale_m"][row], np.linalg.norm(xyz_m[10] - xyz_m[9]), rtol=1e-4)
        keypoints_px = projected(xyz_m)
        np.testing.assert_allclose(index.tables["keypoints_px"][row], keypoints_px, rtol=1e-4)
        low, high = keypoints_px.min(axis=0), keypoints_px.max(axis=0)
        np.testing.assert_allclose(index.box_px[row], [*(low + high) / 2, (high - low).max()], rtol=1e-4)

    group = index.groups.tolist()
    assert group[:3] == group[3:6]  # two cameras show one moment
    assert len(set(group)) == 3 + 2 + 2


def test_splits_keep_recordings_whole(root: Path) -> None:
    train, val, both = (load_ho3d(DataConfig("ho3d", str(root), split=split)) for split in ("train", "val", "all"))
    assert sorted([*train.paths, *val.paths]) == sorted(both.paths)
    assert len(val)
    recordings = [{path.split("/")[1][:3] for path in index.paths} for index in (train, val)]
    assert not recordings[0] & recordings[1]
    assert {path.split("/")[1] for path in val.paths} == {"MC1"}  # golden: a published split must never move


def test_evaluation_part_knows_wrist_and_box(root: Path) -> None:
    index = load_ho3d(DataConfig("ho3d", str(root), part="evaluation"))
    assert index.paths[0] == "evaluation/SM1/rgb/0000.png"
    np.testing.assert_allclose(index.box_px, [[140, 130, 140]] * 4)
    wrist = ho3d_joints(101)[0] * [1, -1, -1]
    np.testing.assert_allclose(index.targets["xyz_m"][3, 0], wrist, rtol=1e-5)
    keypoints_px = index.tables["keypoints_px"]
    np.testing.assert_allclose(keypoints_px[3, 0], projected(wrist[None])[0], rtol=1e-4)
    assert np.isnan(keypoints_px[:, 1:]).all()
    assert np.isnan(index.targets["xyz_m"][:, 1:]).all()
    assert np.isnan(index.targets["scale_m"]).all()


def test_published_evaluation_keypoints_are_used(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "evaluation_xyz.json").write_text(json.dumps([ho3d_joints(seed).tolist() for seed in (0, 1, 100, 101)]))
    (root / "evaluation/SM1/rgb/0001.png").unlink()  # the second row must not shift the others
    index = load_ho3d(DataConfig("ho3d", str(root), part="evaluation"))
    expected = [camera_frame(ho3d_joints(seed)) for seed in (0, 100, 101)]
    np.testing.assert_allclose(index.targets["xyz_m"], expected, rtol=1e-5)
    keypoints_px = index.tables["keypoints_px"]
    low, high = keypoints_px.min(axis=1), keypoints_px.max(axis=1)
    np.testing.assert_allclose(index.box_px[:, :2], (low + high) / 2, rtol=1e-4)
    assert "wrists" not in caplog.text
    (root / "evaluation_xyz.json").write_text(json.dumps([ho3d_joints(seed).tolist() for seed in (1, 0, 100, 101)]))
    load_ho3d(DataConfig("ho3d", str(root), part="evaluation"))
    assert "evaluation_xyz.json: 1 of 3 wrists are elsewhere than in " in caplog.text


def test_missing_images_and_frames_without_a_hand_are_counted_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of boxes has all listed frames: also these, and those of the other split."""
    frames = [f"train/{line.replace('/', '/rgb/')}.png" for line in (root / "train.txt").read_text().split()]
    (root / frames[1]).unlink()
    empty = {**ho3d_meta(0), "handJoints3D": None, "camMat": None}
    (root / "train/MC1/meta/0001.pkl").write_bytes(python2_pickle(empty))
    index = load_ho3d(DataConfig("ho3d", str(root)))
    assert len(index) == 8
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"{root}/train.txt: 8 of 10 listed frames are used; the images of 1 are missing, and")
    np.testing.assert_allclose(index.targets["xyz_m"][1], camera_frame(ho3d_joints(2)), rtol=1e-5)
    boxes = root.parent / "boxes.csv"
    write_boxes(boxes, {frame: [row, 0, row + 2, 1] for row, frame in enumerate(frames)})
    splits = [load_ho3d(DataConfig("ho3d", str(root), split=split, box=str(boxes))) for split in ("train", "val")]
    assert sum(map(len, splits)) == 8
    for index in splits:
        assert index.box_px[:, 0].tolist() == [1 + frames.index(path) for path in index.paths]


def test_annotations_are_read_once(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_ho3d(DataConfig("ho3d", str(root)))
    assert len(list(cache.glob("ho3d-*.npz"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr("peclr_dali.pipelines.sources.ho3d.read_numpy_pickle", None)  # nobody may read again
        np.testing.assert_array_equal(load_ho3d(DataConfig("ho3d", str(root))).targets["xyz_m"], first.targets["xyz_m"])
    folder, file = root / "train/MC1/meta", root / "train/MC1/meta/0001.pkl"
    before = folder.stat().st_mtime_ns
    file.write_bytes(python2_pickle(ho3d_meta(77)))  # in place, of the same size
    assert folder.stat().st_mtime_ns == before
    np.testing.assert_allclose(
        load_ho3d(DataConfig("ho3d", str(root))).targets["xyz_m"][7], camera_frame(ho3d_joints(77)), rtol=1e-5
    )
    write_image(root / "train/MC1/rgb/0009.jpg", 320, 240)  # as in version 3
    (root / "train/MC1/meta/0009.pkl").write_bytes(python2_pickle(ho3d_meta(9)))
    (root / "train.txt").write_text("MC1/0009\n")
    np.testing.assert_allclose(
        load_ho3d(DataConfig("ho3d", str(root))).targets["xyz_m"], [camera_frame(ho3d_joints(9))], rtol=1e-5
    )


def test_by_configuration(root: Path) -> None:
    boxes = root.parent / "boxes.csv"
    write_boxes(boxes, {"evaluation/SM1/rgb/0000.png": [150, 160, 170, 200]})
    index = load_index(DataConfig(source="ho3d", root=str(root), part="evaluation", box=str(boxes), box_margin=2))
    np.testing.assert_allclose(index.box_px, [[160, 180, 80], *[[0, 0, 0]] * 3])
    write_coco_boxes(root.parent / "boxes.json", index.paths, 640, 480)
    assert_refused(
        DataConfig(source="ho3d", root=str(root), part="evaluation", box=str(root.parent / "boxes.json")),
        "4 of 4 images have another size than their labels say", "boxes.json",
    )  # fmt: skip
    assert_refused(
        DataConfig(source="ho3d", root=str(root), part="evaluation", split="val"), "evaluation frames are not split"
    )


def meta(**change: Any) -> Any:
    def damage(root: Path) -> None:
        content = {key: value for key, value in {**ho3d_meta(0), **change}.items() if value is not None}
        (root / "train/MC1/meta/0001.pkl").write_bytes(pickle.dumps(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: root.rename(root.parent / "gone"), r"train\.txt: No such file .*expected HO-3D's frames"),
        (lambda root: (root / "train.txt").write_text("ABF10/0000\nx\n"), r"train\.txt: .*\(line 2: 'x'\); expected"),
        (lambda root: (root / "train.txt").write_text("A/0\n" * 2), r"train\.txt: .*\(empty, or a line twice\)"),
        (lambda root: (root / "train.txt").write_text("../a/b\n"), r"line 1: '\.\./a/b'\); expected"),
        (lambda root: (root / "train").rename(root / "training"), r"none of 10 images exists; the first would be"),
        (lambda root: (root / "train/MC1/meta/0001.pkl").unlink(), r"0001\.pkl: No such file.*; expected a pickled"),
        (meta(handJoints3D=1000 * ho3d_joints(0)), "1 of 10 hands .* more than 20 m .*MC1/rgb/0001.png "),
        (meta(handJoints3D=np.zeros((20, 3))), r"0001\.pkl: handJoints3D is 20 x 3; expected 21 x 3 or"),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_in_one_line(root: Path, damage: Any, message: str) -> None:
    damage(root)
    assert_refused(DataConfig("ho3d", str(root)), message, root)


@pytest.mark.parametrize(
    ("joints", "message"),
    [
        (np.zeros((3, 21, 3)), r"keypoints of 3 frames, but evaluation\.txt lists 4"),
        (1000 * np.stack([ho3d_joints(0)] * 4), "4 of 4 hands .* more than 20 m .*Are these millimetres"),
    ],
)
def test_wrong_evaluation_keypoints_are_named(root: Path, joints: np.ndarray, message: str) -> None:
    (root / "evaluation_xyz.json").write_text(json.dumps(joints.tolist()))
    assert_refused(DataConfig("ho3d", str(root), part="evaluation"), message, root / "evaluation_xyz.json")


def test_a_set_without_a_hand_or_a_second_recording_is_refused(tmp_path: Path) -> None:
    write_ho3d(tmp_path, "train", {"ABF10": 1, "ABF11": 1})
    assert_refused(DataConfig("ho3d", str(tmp_path), split="val"), "one recording, 'ABF1', cannot be split")
    for meta_file in tmp_path.glob("train/*/meta/*.pkl"):
        meta_file.write_bytes(python2_pickle({"objName": "x"}))
    assert_refused(
        DataConfig("ho3d", str(tmp_path)),
        r"train/\*/meta: data.split = 'all' leave no image .* Mend the data\.",
    )

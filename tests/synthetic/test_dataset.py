import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from peclr_dali import DataConfig, UserError
from peclr_dali.pipelines.sources.boxes import read_boxes
from peclr_dali.pipelines.sources.freihand import load_freihand
from peclr_dali.synthetic import dataset
from peclr_dali.synthetic.dataset import Recipe, make_dataset, parts_of, scenes_of
from peclr_dali.synthetic.hand import project
from peclr_dali.synthetic.scenes import draw_scene
from tests.train.tiny_run import ROOT

POSES, SEED, SCENES = 9, 5, 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "hands"
    render(out)
    return out


def render(out: Path, **arguments: Any) -> None:
    """Render the dataset of `made`, but for these arguments."""
    make_dataset(out, **{"poses": POSES, "seed": SEED, "scenes": SCENES, "workers": 1, **arguments})


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_layout_is_freihands(made: Path) -> None:
    names = set(contents(made))
    images = {f"training/rgb/{number:08d}.jpg" for number in range(4 * POSES)} | {"evaluation/rgb/00000000.jpg"}
    lists = {f"{part}_{key}.json" for part in ("training", "evaluation") for key in ("K", "xyz", "scale")}
    assert names == images | lists | {"dataset.json", "evaluation_boxes.csv"}
    for name in images:
        assert np.asarray(cv2.imread(str(made / name))).shape == (224, 224, 3)


@pytest.mark.parametrize(("part", "entries"), [("training", POSES), ("evaluation", 1)])
def test_annotations_have_one_entry_per_pose(made: Path, part: str, entries: int) -> None:
    intrinsics, xyz, scale = (
        np.array(json.loads((made / f"{part}_{key}.json").read_text())) for key in ("K", "xyz", "scale")
    )
    assert (intrinsics.shape, xyz.shape, scale.shape) == ((entries, 3, 3), (entries, 21, 3), (entries,))
    np.testing.assert_allclose(scale, np.linalg.norm(xyz[:, 10] - xyz[:, 9], axis=1), rtol=1e-12)
    for pose in range(entries):
        image = project(xyz[pose], intrinsics[pose])
        assert ((image > 0) & (image < 224)).all()


def test_boxes_are_those_that_the_loader_takes_from_the_joints(made: Path) -> None:
    joints = load_freihand(DataConfig(root=str(made), part="evaluation", split="all", box="joints"))
    boxes = read_boxes(made / "evaluation_boxes.csv", [Path(joints.path(row)).name for row in range(len(joints))])
    assert boxes.image.tolist() == list(range(len(joints)))
    np.testing.assert_allclose(boxes.box_px, joints.box_px, atol=0.02)


def test_versions_show_four_scenes(made: Path) -> None:
    for pose in range(3):
        versions = [
            np.asarray(cv2.imread(str(made / f"training/rgb/{pose + POSES * version:08d}.jpg")), dtype=float)
            for version in range(4)
        ]
        corners = np.array([version[:12, :12].mean(axis=(0, 1)) for version in versions])
        assert np.abs(corners[:, None] - corners[None]).max(axis=-1)[~np.eye(4, dtype=bool)].min() > 1.0


def test_two_workers_write_the_same_bytes_as_one(made: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    render(tmp_path / "two", workers=2, progress=lambda done, total: seen.append((done, total)))
    assert contents(tmp_path / "two") == contents(made)
    assert seen[-1] == (4 * POSES + 1, 4 * POSES + 1)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_varied_hands_are_another_dataset(made: Path, tmp_path: Path) -> None:
    render(tmp_path / "varied", poses=1, varied=True)
    one, other = contents(made), contents(tmp_path / "varied")
    assert json.loads(one["training_xyz.json"])[0] != json.loads(other["training_xyz.json"])[0]
    with pytest.raises(UserError, match=r'varied holds .*"varied": true'):
        render(tmp_path / "varied", poses=1)


def test_scenes_are_shared_and_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = Mock(side_effect=draw_scene)
    dataset._scene.cache_clear()
    monkeypatch.setattr(dataset, "draw_scene", drawn)
    render(tmp_path / "few", poses=4, seed=9, scenes=2)
    assert drawn.call_count == 2
    recipe = Recipe(poses=300, seed=1, scenes=40)
    training, evaluation = parts_of(recipe)
    places = np.array([scenes_of(recipe, training, pose) for pose in range(300)])
    assert all(len(set(row)) == 4 for row in places.tolist())
    assert set(places.ravel().tolist()) == set(range(40))
    assert {len(scenes_of(recipe, evaluation, pose)) for pose in range(5)} == {1}


def test_a_finished_dataset_is_left_alone_and_a_damaged_one_mended(made: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    render(made)
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    for lost in ("evaluation/rgb/00000000.jpg", "training/rgb/00000001.jpg", "training_K.json"):
        damaged = shutil.copytree(made, tmp_path / Path(lost).stem)
        (damaged / lost).write_bytes(b"") if "1" in lost or "K" in lost else (damaged / lost).unlink()
        render(damaged)
        assert contents(damaged) == contents(made)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("out/thesis.tex", "precious", r"holds something else \(no dataset.json\)"),
        ("out/dataset.json", "{broken", r"holds \{broken"),
        ("out/dataset.json", json.dumps({"poses": 9, "seed": 5, "scenes": 6, "format": 2}), 'holds .*"format": 2'),
    ],
)
def test_a_place_with_something_else_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as refusal:
        render(tmp_path / "out")
    assert "\n" not in str(refusal.value)
    assert contents(tmp_path) == {name: content.encode()}


def test_an_interrupted_dataset_is_finished_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "resumed"

    def interrupt(done: int, total: int) -> None:
        if done > 4 * 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        render(out, progress=interrupt)
    assert not (out / "evaluation_boxes.csv").exists()
    with pytest.raises(UserError, match="give the same arguments"):
        render(out, scenes=SCENES + 1)
    first = out / "training/rgb/00000000.jpg"
    kept = first.stat().st_mtime_ns
    (out / "training/rgb/00000003.jpg").unlink()
    (out / "training/rgb/00000000.jpg.part").write_bytes(b"half")
    render(out)
    assert first.stat().st_mtime_ns == kept
    assert contents(out) == contents(made)


def test_sigterm_ends_the_rendering_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, f"{ROOT}/cli.py", "make-data", f"{tmp_path}/out", "--poses", "100000", "--workers", "2"]
    rendering = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while rendering.poll() is None and not list(tmp_path.glob("out/training/rgb/*")):
            time.sleep(0.1)
        rendering.terminate()
        _, error = rendering.communicate(timeout=120)
    finally:
        rendering.kill()
    lines = [line for line in error.splitlines() if not line.startswith("rendering")]
    assert (rendering.returncode, lines) == (128 + signal.SIGTERM, [])

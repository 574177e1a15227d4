"""A body of 17 points without depths, from pictures to predictions: only 2D is learnt, measured and shown."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.config import PoseConfig
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.samples.join import join
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import BODY
from peclr_dali.train.config.finetuning import FinetuneConfig, FinetuneDataConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.evaluate import evaluate
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.labels import PoseLabels, labels_to_learn, left_for_right
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.report.write import write_report
from tests.command_line import run_cli
from tests.train import tiny_hands, tiny_people, tiny_run

SETTINGS = ("data.source=coco", "pose.skeleton=body", "geometry.rotation_deg=[-20, 20]")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people") / "data"
    tiny_people.write_people(root, 44)
    return root


@pytest.fixture(scope="module")
def runs(people: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of pre-training, and of fine-tuning from it."""
    out = tmp_path_factory.mktemp("runs")
    settings = tiny_run.settings(people, out / "pretrained", "data.source=coco", "train.epochs=1")
    pretrain(load_config(Config, [], settings))
    start = f"encoder.weights={out / 'pretrained'}"
    finetune(tiny_hands.config_of(people, out / "tuned", *SETTINGS, start))
    return out / "pretrained", out / "tuned"


def test_only_2d_keypoints_are_learnt_and_measured(runs: tuple[Path, Path]) -> None:
    rows = tiny_run.rows_of(runs[1])
    assert rows[-1]["keypoints_px"] < rows[0]["keypoints_px"]
    assert all(row["depth"] == row["root_depth"] == 0 for row in rows)
    validations = [json.loads(line) for line in (runs[1] / "validation.jsonl").read_text().splitlines()]
    assert all(math.isnan(row["pa_epe_cm"]) and math.isnan(row["epe_cm"]) for row in validations)
    assert all(math.isfinite(row["constant_epe_px"]) and "constant_pa_epe_cm" not in row for row in validations)
    best = torch.load(next((runs[1] / "best").glob("*.pt")), weights_only=True)
    assert best["validation"]["epe_px"] == min(row["epe_px"] for row in validations)
    assert best["config"]["pose"]["skeleton"] == "body"
    assert best["config"]["pose"]["root"] == "left_hip"
    assert not load_pose_run(runs[1]).depth
    assert all((runs[1] / name).exists() for name in ("predictions.png", "loss.png", "views.png"))


def test_the_evaluation_gives_2d_metrics_only(runs: tuple[Path, Path], people: Path, tmp_path: Path) -> None:
    evaluate(
        runs[1], [], [], out=tmp_path, compare=None, crop="boxes", worst=3, submission=False, proper_rotation=False
    )
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert list(found["metrics"]) == ["epe_px"]
    assert list(found["pck"]) == ["2d_px"]
    assert list(found["per_keypoint"]["epe_px"]) == list(BODY.keypoints)
    assert found["images"] == 4
    held_out = load_index(load_pose_run(runs[1]).config.data)
    assert len(held_out) == 40
    assert (tmp_path / "worst.png").exists()


def test_a_prediction_has_17_points_and_no_depth(
    runs: tuple[Path, Path], people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("predict", str(runs[1]), str(people / "images" / "0003.jpg"), "--out", str(tmp_path)) == 0
    assert "the poses have only 2D keypoints: the network was trained without depths" in capsys.readouterr().out
    said = json.loads((tmp_path / "predictions.json").read_text())
    assert (said["skeleton"], said["keypoints"]) == ("body", list(BODY.keypoints))
    (one,) = said["predictions"]
    assert (np.shape(one["keypoints_px"]), one["joints"]) == ((17, 2), None)
    assert (tmp_path / "0003.png").exists()


def test_the_report_shows_it(runs: tuple[Path, Path], people: Path, tmp_path: Path) -> None:
    evaluate(runs[1], [], [], out=None, compare=None, crop="boxes", worst=3, submission=False, proper_rotation=False)
    predict(runs[1], [str(people / "images" / "0001.jpg")], tmp_path / "predictions")
    write_report([*runs], tmp_path / "report.html", predictions=tmp_path / "predictions")
    page = (tmp_path / "report.html").read_text()
    assert "shoulders" in page
    assert "thumb" not in page


def test_a_finished_run_is_resumed_as_it_was(runs: tuple[Path, Path], people: Path) -> None:
    start = f"encoder.weights={runs[0]}"
    folder = finetune(tiny_hands.config_of(people, runs[1], *SETTINGS, start), "auto")
    assert folder.root == runs[1]


def test_labels_of_another_skeleton_are_refused(people: Path, tmp_path: Path) -> None:
    config = tiny_hands.config_of(people, tmp_path / "run", "data.source=coco")
    with pytest.raises(UserError, match=r"has labels of a body, pose.skeleton is 'hand': set pose.skeleton = 'body'"):
        finetune(config)
    hands = tmp_path / "hands"
    tiny_hands.write_hands(hands, 4)
    run = tiny_hands.untrained_run(tmp_path / "of_body", f"data.root={hands}", "pose.skeleton=body")
    with pytest.raises(UserError, match=r"has labels of a hand, but .* predicts a body: use another source"):
        evaluate(
            run, [], ["data.split=all"], out=tmp_path, compare=None, crop="boxes", worst=3, submission=False,
            proper_rotation=False,
        )  # fmt: skip
    mixture = f"data=[{{source='coco', root='{people}'}}, {{root='{hands}'}}]"
    with pytest.raises(UserError, match=r"the sources label a body .* and a hand .*: expected one kind of skeleton"):
        load_index(load_config(FinetuneConfig, [], [mixture]).data)


def test_a_mirrored_view_swaps_left_and_right(people: Path) -> None:
    """What is seen at a left wrist's place in a mirror looks like a right wrist."""
    index = load_index(FinetuneDataConfig(source="coco", root=str(people), split="all"))
    count = len(index)
    assert index.keypoints_px is not None
    mirrored = dataclasses.replace(index, mirror=np.ones(count, bool))
    flip = torch.tensor([[-1.0, 0, 64], [0, 1, 0]]).expand(count, 2, 3)
    identity = torch.eye(2, 3).expand(count, 2, 3)
    image = torch.zeros(count, 3, 8, 8, dtype=torch.uint8)
    pose, rows = PoseConfig(skeleton="body"), torch.arange(count)
    seen = PoseLabels.of(mirrored).of_view(View(image, flip, flip), rows, pose).keypoints_px
    plain = PoseLabels.of(index).of_view(View(image, identity, identity), rows, pose).keypoints_px
    left, right = (BODY.keypoints.index(f"{side}_wrist") for side in ("left", "right"))
    torch.testing.assert_close(seen[:, left, 0], 64 - plain[:, right, 0], equal_nan=True)
    torch.testing.assert_close(seen[:, right, 1], plain[:, left, 1], equal_nan=True)
    back = left_for_right(seen.numpy(), np.ones(count, bool), BODY)  # as predictions are given
    np.testing.assert_allclose(64 - back[..., 0], plain[..., 0].numpy())


def test_sources_with_and_without_depth_are_learnt_together(tmp_path: Path) -> None:
    """Hands of FreiHAND's layout with 3D labels, and hands in COCO's format without."""
    tiny_hands.write_hands(tmp_path / "deep", 4)
    deep = load_index(FinetuneDataConfig(root=str(tmp_path / "deep"), split="all"))
    assert deep.keypoints_px is not None
    flat = dataclasses.replace(deep, name="flat", targets={})
    labels = labels_to_learn(join([deep, flat], [1.0, 1.0]), PoseConfig())
    assert labels.in_metres
    assert labels.has_camera.tolist() == [True] * 16 + [False] * 16
    matrix = torch.eye(2, 3).expand(32, 2, 3)
    view = View(torch.zeros(32, 3, 8, 8, dtype=torch.uint8), matrix, matrix)
    targets = labels.of_view(view, torch.arange(32), PoseConfig())
    assert targets.keypoints_px.isfinite().all()
    assert targets.relative_depth[:16].isfinite().all()
    assert targets.relative_depth[16:].isnan().all()
    unlabelled = dataclasses.replace(deep, name="none", keypoints_px=None, targets={})
    with pytest.raises(UserError, match="a pose is learnt from camera matrices and 3D keypoints"):
        labels_to_learn(join([deep, unlabelled], [1.0, 1.0]), PoseConfig())

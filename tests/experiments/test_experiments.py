"""Experiments: what is recorded, when, and what a comparison claims. Training itself is replaced."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from bench.documentation import fill_tables, save_comparisons
from errors import UserError
from experiments import run
from experiments.config import Arm, Comparison, ExperimentConfig, Phase, load_experiment
from experiments.run import compare, constant_errors, run_experiment
from tests.train import tiny_hands
from train.distributed.interrupt import Interrupted

HANDS = 50


def config_of(root: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> ExperimentConfig:
    return ExperimentConfig(
        pretrain=Phase({"peclr": Arm()}, set=("encoder.name=resnet18",)),
        finetune=Phase({"ours": Arm(start="peclr"), "scratch": Arm(set=("encoder.weights=random",))}),
        compare=(Comparison("ours", "scratch"), Comparison("ours", "scratch", "auc")),
        out=root / "runs",
        data=root,
        seeds=seeds,
    )


def rows_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


class Training:
    """Takes the place of training: pre-training takes 2 seconds of a CPU, fine-tuning 1.

    Attributes:
        interrupted: whether the next run ends by a signal.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._now = 0.0

    def __call__(self, config: Any, resume: str) -> Any:
        self._now += 2.0 if "pretrain" in config.run.out else 1.0
        if self.interrupted:
            raise Interrupted(15, 3, Path(config.run.out))
        return SimpleNamespace(checkpoints=SimpleNamespace(latest=lambda: Path(config.run.out)))

    def process_time(self) -> float:
        return self._now


def measured(run: Path, data: Path) -> dict[str, Any]:
    seed = int(run.parent.name.removeprefix("seed_"))
    error = np.full((HANDS, 21), 1.0 + 0.01 * seed - (0.2 if "ours" in run.name else 0.0))
    return {"pa_epe_cm": error, "epe_cm": error, "epe_px": error, "auc": 1 - error / 5, "pa_auc": 1 - error / 5}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training()
    monkeypatch.setattr(run, "pretrain", made)
    monkeypatch.setattr(run, "finetune", made)
    monkeypatch.setattr(run, "measure_arm", measured)
    monkeypatch.setattr(run, "load_pose_run", lambda path: path)
    monkeypatch.setattr(
        run, "measure_constants", lambda data: {"mean_pose_pa_epe_cm": 3.0, "rigid_hand_pa_epe_cm": 1.5}
    )
    monkeypatch.setattr(time, "process_time", made.process_time)
    return made


def test_rows_are_written_once(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    outcomes = run_experiment(config_of(tmp_path), record)
    rows = rows_of(record)
    assert [row["kind"] for row in rows] == ["pretrain", "finetune", "finetune", "seed"] * 3 + [
        "constant",
        "comparison",
        "comparison",
    ]
    assert all(outcome["holds"] for outcome in outcomes)
    assert run_experiment(config_of(tmp_path), record) == outcomes
    assert rows_of(record) == rows


def test_a_seed_s_time_is_that_of_its_runs(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    run_experiment(config_of(tmp_path, (0,)), record)
    assert [row["cpu_seconds"] for row in rows_of(record) if "cpu_seconds" in row] == [2, 1, 1, 4]


def test_an_interrupted_run_s_time_counts(training: Training, tmp_path: Path) -> None:
    config, record = config_of(tmp_path, (0,)), tmp_path / "rows.jsonl"
    training.interrupted = True
    with pytest.raises(Interrupted):
        run_experiment(config, record)
    training.interrupted = False
    run_experiment(config, record)
    assert [row["cpu_seconds"] for row in rows_of(record) if row["kind"] == "pretrain"] == [4]


def test_one_seed_supports_no_claim(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    (outcome, _) = run_experiment(config_of(tmp_path, (0,)), record)
    assert not outcome["holds"]
    assert "comparison" not in {row["kind"] for row in rows_of(record)}


def write_tables_of(config: ExperimentConfig, ours: list[float], spread: float = 0.0) -> None:
    noise = spread * np.random.default_rng(0).normal(size=(HANDS, 1)).repeat(21, axis=1)
    for seed, difference in zip(config.seeds, ours, strict=True):
        folder = config.out / f"seed_{seed}"
        folder.mkdir(parents=True)
        np.savez(folder / "errors_scratch.npz", pa_epe_cm=np.ones((HANDS, 21)))
        np.savez(folder / "errors_ours.npz", pa_epe_cm=1 + difference + noise)


def test_the_interval_holds_the_seeds_variance(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_tables_of(config, [-0.1, -0.2, -0.3])
    outcome = compare(config, config.compare[0])
    # Student's for three numbers: mean -0.2, deviation 0.1, 4.303 for two degrees of freedom.
    assert outcome["mean"] == pytest.approx(-0.2)
    assert (outcome["low"], outcome["high"]) == pytest.approx((-0.2 - 0.2484, -0.2 + 0.2484), abs=1e-3)
    assert not outcome["holds"]


def test_the_interval_holds_the_hands_variance(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_tables_of(config, [-0.2, -0.2, -0.2], spread=1.0)
    outcome = compare(config, config.compare[0])
    assert outcome["high"] - outcome["low"] == pytest.approx(2 * 4.303 / HANDS**0.5, rel=0.35)


def test_constants_of_a_hand_that_only_turns() -> None:
    """About its long axis: the rigid hand is exact, and the mean pose shrinks to a line."""
    hand = tiny_hands.random_hands_m(np.random.default_rng(0), 1)[0]
    angles_rad = np.random.default_rng(1).uniform(0, 2 * np.pi, 200)
    hands = np.stack([hand @ cv2.Rodrigues(np.array([0, angle_rad, 0]))[0].T for angle_rad in angles_rad])
    errors = constant_errors(hands[:100], hands[100:])
    assert errors["rigid_hand_pa_epe_cm"] < 1e-6
    assert errors["mean_pose_pa_epe_cm"] > 1


def test_the_page_and_the_picture(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "experiments.jsonl"
    outcomes = run_experiment(config_of(tmp_path), record)
    made = fill_tables("<!-- rows: experiment -->\nold\n<!-- end rows -->\n", tmp_path)
    assert "| ours minus scratch | PA-EPE, cm | -0.200, -0.200, -0.200 | -0.200 |" in made
    assert "| ours | 0.810 |" in made
    assert "3.000 cm" in made
    save_comparisons(outcomes, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_labels_of_one_point_do_not_count() -> None:
    hands = tiny_hands.random_hands_m(np.random.default_rng(0), 20)
    spoilt = np.concatenate([np.full((1, 21, 3), 0.5), hands[:10]]), np.concatenate([hands[10:], np.ones((1, 21, 3))])
    assert constant_errors(*spoilt) == constant_errors(hands[:10], hands[10:])
    with pytest.raises(UserError, match="all 3 labels are a single point or not finite"):
        constant_errors(hands, np.full((3, 21, 3), np.nan))


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("pretrain.arms.simclr.set=['equivariance.varient=none']", "pretrain.arms.simclr: .*equivariance.variant"),
        ("finetune.arms.scratch_10.set=['train.epochs=many']", "finetune.arms.scratch_10: .*train.epochs = 'many'"),
        ("finetune.set=['train.recompute=always']", "finetune.arms.scratch_10: .*unknown key train.recompute"),
        ("pretrain.config=['missing.toml']", "pretrain.arms.peclr: .*missing.toml"),
        ("pretrain.arms.peclr.start=simclr", "pretrain.arms.peclr.start: only arms of finetune"),
    ],
)
def test_a_mistake_in_any_arm_is_reported_before_the_first(arm: str, said: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "studies" / "hands.toml"
    with pytest.raises(UserError, match=said):
        load_experiment(file, [arm])

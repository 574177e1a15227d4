"""Studies: what is recorded, when, and what a comparison claims. Training itself is replaced."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.errors import UserError
from peclr_dali.experiments import compare as compare_module
from peclr_dali.experiments import measure, run
from peclr_dali.experiments.compare import Row, compare
from peclr_dali.experiments.config import (
    Arm,
    Claim,
    Dataset,
    Maps,
    MeasuredArm,
    Plan,
    Render,
    Scale,
    Shared,
    Study,
    load_study,
)
from peclr_dali.experiments.measure import Arrays
from peclr_dali.experiments.run import run_study
from peclr_dali.pipelines.config import each_source
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.interrupt import Interrupted
from peclr_dali.train.pose.metrics import confidence_intervals
from peclr_dali.train.runs.checkpoint import write_checkpoint
from tests.command_line import run_cli

HANDS = 50


def plan_of(root: Path, seeds: tuple[int, ...] = (0, 1, 2), pretrain_seeds: int | None = None) -> Plan:
    study = Study(
        title="Title",
        source="Table 9",
        pretrain={"peclr": Arm()},
        arms={"ours": MeasuredArm(start="peclr"), "scratch": MeasuredArm(set=("encoder.weights=random",))},
        compare=(Claim("ours", "scratch"), Claim("ours", "scratch", "auc")),
        scales={"small": Scale({"first": Dataset(str(root))}, pretrain=Shared(set=("encoder.name=resnet18",)))},
        seeds=seeds,
        pretrain_seeds=pretrain_seeds,
        out=root / "runs",
    )
    return Plan(root / "two_arms.toml", study, "small")


def rows_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


class Training:
    """Takes the place of training.

    Attributes:
        interrupted: whether the next run ends by a signal, after it has made its folder.
        network: the content of the networks.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.network = "first"

    def __call__(self, config: Any, resume: str) -> Any:
        Path(config.run.out).mkdir(parents=True, exist_ok=True)
        if self.interrupted:
            raise Interrupted(15, 3, Path(config.run.out))
        write_network(Path(config.run.out), self.network)


def write_network(run: Path, content: str) -> None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(run / "checkpoints" / "step_000000001.pt", 1, {"content": content})


def errors_of(network: Path, overrides: list[str], *, true_root: bool = False) -> Arrays:
    assert true_root == network.parents[1].name.startswith("probe_")  # of read-outs
    run = network.parents[1]
    seed = int(run.parent.name.removeprefix("seed_"))
    error = np.full((HANDS, 21), 1.0 + 0.01 * seed - (0.2 if "ours" in run.name else 0.0))
    tables = {"pa_epe_cm": error, "epe_cm": error, "epe_px": error, "auc": 1 - error / 5, "pa_auc": 1 - error / 5}
    return {**tables, "groups": np.arange(HANDS)}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training()
    monkeypatch.setattr(run, "pretrain", made)
    monkeypatch.setattr(run, "finetune", made)
    monkeypatch.setattr(measure, "measure_errors", errors_of)
    monkeypatch.setattr(measure, "measure_maps", lambda network, overrides, maps: {"rotation_deg": np.zeros(2)})
    monkeypatch.setattr(measure, "load_pose_run", lambda path: path)
    constants = {"mean_pose_pa_epe_cm": 3.0, "rigid_hand_pa_epe_cm": 1.5}
    monkeypatch.setattr(run, "measure_constants", lambda overrides: constants)
    monkeypatch.setattr(run, "require_held_out", lambda plan: None)
    return made


@pytest.mark.parametrize("data", [("first",), ("first", "second")])
def test_a_later_override_wins_with_any_number_of_datasets(tmp_path: Path, data: tuple[str, ...]) -> None:
    arm = Arm(set=("train.epochs=20",), set_at={"small": ("train.epochs=10",)}, data=data)
    shared = Shared(set=("encoder.name=resnet18", "train.epochs=10"))
    scale = Scale({name: Dataset(str(tmp_path)) for name in ("first", "second")}, pretrain=shared)
    study = replace(plan_of(tmp_path).study, pretrain={"peclr": arm}, scales={"small": scale})
    config, overrides = Plan(tmp_path / "study.toml", study, "small").settings(Config, "peclr", 0)
    assert config.train.epochs == 10
    assert overrides.count("encoder.name=resnet18") == 1


def test_rows_are_written_once(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    outcomes = run_study(plan_of(tmp_path), record)
    rows = rows_of(record)
    kinds = ["pretrain", "arm", "arm"] * 3 + ["constant", "comparison", "comparison"]
    assert [row["kind"] for row in rows] == kinds
    assert {(row["study"], row["scale"]) for row in rows} == {("two_arms", "small")}
    assert all(outcome["holds"] for outcome in outcomes)
    assert run_study(plan_of(tmp_path), record) == outcomes
    assert rows_of(record) == rows


def test_the_row_of_a_pre_training_has_its_probes(training: Training, tmp_path: Path) -> None:
    plan, record = plan_of(tmp_path, (0,)), tmp_path / "rows.jsonl"
    folder = plan.folder(0, "pretrain", "peclr")
    folder.mkdir(parents=True)
    probes = [
        {"step": step, "epe_px_of_224": 60.0 - step, "pa_epe_cm": 2.0, "constant_epe_px_of_224": 56.0}
        for step in (1, 9)
    ]
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in probes))
    run_study(plan, record)
    (row,) = (row for row in rows_of(record) if row["kind"] == "pretrain")
    found = {key: row[key] for key in row if key.startswith("probe")}
    assert found == {"probe_step": [1, 9], "probe_epe_px": [59.0, 51.0], "probe_constant_epe_px": 56.0}


def test_a_comparison_is_written_before_the_next_one_fails(training: Training, tmp_path: Path) -> None:
    record, plan = tmp_path / "rows.jsonl", plan_of(tmp_path)
    plan.compare = (plan.compare[0], replace(plan.compare[1], metric="epe_px"))
    without_px = lambda *given: {key: value for key, value in errors_of(*given).items() if key != "epe_px"}  # noqa: E731
    with (
        patch.object(measure, "measure_errors", without_px),
        pytest.raises(UserError, match="epe_px cannot be measured"),
    ):
        run_study(plan, record)
    assert [row["metric"] for row in rows_of(record) if row["kind"] == "comparison"] == ["pa_epe_cm"]


def test_images_to_measure_on_that_are_missing_end_a_study_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "pretrain", lambda *_: pytest.fail("trains"))
    (tmp_path / "training").mkdir()
    with pytest.raises(UserError, match="evaluation"):
        run_study(plan_of(tmp_path), None)


def test_a_row_that_changed_and_changed_back_is_written_again(training: Training, tmp_path: Path) -> None:
    """The newest row counts, so the first one cannot stand for the third."""
    record = tmp_path / "rows.jsonl"
    for error_cm in (3.0, 4.0, 3.0, 3.0):
        with patch.object(run, "measure_constants", lambda overrides, error_cm=error_cm: {"mean_pose": error_cm}):
            run_study(plan_of(tmp_path, (0,)), record)
    assert [row["mean_pose"] for row in rows_of(record) if row["kind"] == "constant"] == [3.0, 4.0, 3.0]


def test_each_seed_may_hold_out_other_images(training: Training, tmp_path: Path) -> None:
    """The folds are in the keys of training, of measuring and of several datasets; the constant is their mean."""
    folds = Dataset(str(tmp_path), set=("data.box=fold_{seed}.csv",), held_out=("data.box=held_{seed}.csv",))
    study = replace(plan_of(tmp_path, (0, 2)).study, scales={"small": Scale({"first": folds, "second": folds})})
    plan = Plan(tmp_path / "study.toml", study, "small")
    assert "data.box=fold_2.csv" in plan.settings(FinetuneConfig, "ours", 2)[1]
    assert plan.held_out("ours", 2)[-1] == "data.box=held_2.csv"
    both = replace(study, pretrain={"peclr": Arm(data=("first", "second"))})
    config, _ = Plan(tmp_path / "study.toml", both, "small").settings(Config, "peclr", 2)
    assert [source.box for source in each_source(config.data)] == ["fold_2.csv", "fold_2.csv"]
    record = tmp_path / "rows.jsonl"
    with patch.object(run, "measure_constants", lambda overrides: {"mean_pose": float(overrides[-1][14])}):
        run_study(plan, record)
    assert [row["mean_pose"] for row in rows_of(record) if row["kind"] == "constant"] == [1.0]


def test_hands_of_one_seed_are_drawn_for_themselves(tmp_path: Path) -> None:
    """Folds of 30 and 20 hands, whose groups have the same numbers: 50 hands, as if one seed had measured them all."""
    errors = {0: np.random.default_rng(0).normal(size=(30, 21)), 1: np.random.default_rng(1).normal(size=(20, 21))}

    def measured(plan: Plan, seed: int, name: str) -> Arrays:
        table = errors[seed] if name == "ours" else np.zeros_like(errors[seed])
        return {"pa_epe_cm": table, "groups": np.arange(len(table)) // 2}

    folds = Scale({"first": Dataset(str(tmp_path), held_out=("data.box=held_{seed}.csv",))})
    study = replace(plan_of(tmp_path, (0, 1)).study, scales={"small": folds})
    with patch.object(compare_module, "measured_errors", measured):
        found = compare(Plan(tmp_path / "study.toml", study, "small"), study.compare[0])
    groups = np.concatenate([np.arange(30) // 2, 15 + np.arange(20) // 2])
    hands = confidence_intervals({"all": np.concatenate([errors[0], errors[1]])}, groups=groups)["all"]
    differences = [float(errors[seed].mean()) for seed in (0, 1)]
    over_seeds = interval_of_mean(differences).high - np.mean(differences)
    assert found["mean"] == pytest.approx(np.mean(differences))
    assert found["high"] - found["mean"] == pytest.approx(np.hypot(over_seeds, (hands.high - hands.low) / 2))


def test_folds_do_not_go_with_shared_pretrainings() -> None:
    file = Path(__file__).parents[2] / "configs" / "studies" / "compositions.toml"
    with pytest.raises(UserError, match=r"has pretrain_seeds and a key with \{seed\}: a network could be measured on"):
        load_study(file, ["pretrain_seeds=2", "arms.peclr.set=['data.box=fold_{seed}.csv']"])


def test_an_arm_starts_from_the_measured_one_before_it(training: Training, tmp_path: Path) -> None:
    """Chosen alone, it brings that arm and what that starts from, and no measured arm of a pre-training's name."""
    arms = {
        "peclr": MeasuredArm(start="peclr", by="probe"),
        "tuned": MeasuredArm(start="peclr"),
        "again": MeasuredArm(start="tuned", by="probe"),
    }
    study = replace(plan_of(tmp_path, (0,)).study, arms=arms, compare=())
    plan = Plan(tmp_path / "study.toml", study, "small", ["again"])
    assert list(plan.arms) == ["tuned", "again"]
    assert plan.settings(FinetuneConfig, "tuned", 0)[0].encoder.weights == str(plan.folder(0, "pretrain", "peclr"))
    assert plan.settings(FinetuneConfig, "again", 0)[0].encoder.weights == str(plan.folder(0, "finetune", "tuned"))
    record, read_out = tmp_path / "rows.jsonl", Training()
    with patch.object(run, "fit_read_out", read_out):
        run_study(plan, record)
    measured = {row["arm"]: (row["by"], row.get("true_root")) for row in rows_of(record) if row["kind"] == "arm"}
    assert measured == {"tuned": ("finetune", None), "again": ("probe", True)}
    assert {path.name for path in plan.out.glob("seed_0/*") if path.is_dir()} == {
        "pretrain_peclr", "finetune_tuned", "probe_again",
    }  # fmt: skip


def test_figures_of_another_encoder_are_refused(training: Training, tmp_path: Path) -> None:
    """The pre-training was made again, with another result; the read-out of the first one must not stand beside it."""
    plan, record = plan_of(tmp_path, (0,)), tmp_path / "rows.jsonl"
    run_study(plan, record)
    training.network = "second"
    with pytest.raises(UserError, match=r"finetune_ours was trained from another encoder than .*: remove "):
        run_study(plan, record)
    shutil.rmtree(plan.run_of("ours", 0))
    run_study(plan, record)


def test_runs_of_other_commands_and_interrupted_ones_are_taken_up(training: Training, tmp_path: Path) -> None:
    """As on a cluster, by the commands of `--list`. Their encoders are known from then on."""
    plan = plan_of(tmp_path, (0,))
    write_network(plan.folder(0, "pretrain", "peclr"), "first")
    training.interrupted = True
    with pytest.raises(Interrupted):
        run_study(plan, None)
    training.interrupted = False
    write_network(plan.run_of("ours", 0), "first")
    run_study(plan, None)
    training.network = "second"
    with pytest.raises(UserError, match="was trained from another encoder"):
        run_study(plan, None)


SIDE_FILES = ("errors_finetune_ours.npz", "map_ours.npz", "finetune_ours.encoder")


def damage(file: Path, kind: str) -> None:
    """Make a file empty, cut it, or put something else in its place."""
    whole = file.read_bytes()
    others = {"empty": b"", "cut": whole[: len(whole) // 2], "text": b"nothing", "json": b"{}", "bytes": b"\xff\xfe"}
    if kind in others:
        file.write_bytes(others[kind])
    elif kind == "array":
        np.save(file.with_suffix(".npy"), np.zeros(3))
        file.with_suffix(".npy").rename(file)
    elif kind in ("other arrays", "objects"):
        made_from = np.load(io.BytesIO(whole))["made_from"] if file.suffix == ".npz" else ""
        arrays = np.zeros(3) if kind == "other arrays" else np.array([None, {}])
        with file.open("wb") as out:
            np.savez(out, pa_epe_cm=arrays, made_from=made_from, digest=0)
    else:
        file.unlink()
        file.mkdir() if kind == "folder" else os.mkfifo(file)


DAMAGES = ("empty", "cut", "text", "json", "bytes", "array", "other arrays", "objects", "folder", "pipe")


@pytest.mark.parametrize("kind", ["empty", "cut", "text", "folder", "pipe"])
def test_a_damaged_network_is_one_line(kind: str, tmp_path: Path) -> None:
    write_network(tmp_path, "first")
    (file,) = (tmp_path / "checkpoints").iterdir()
    damage(file, kind)
    with pytest.raises(UserError, match="cannot be used"):
        measure.checksum(file)


@pytest.mark.parametrize("name", SIDE_FILES)
def test_damaged_side_files_are_one_line(name: str, training: Training, tmp_path: Path) -> None:
    study = replace(plan_of(tmp_path, (0,)).study, maps=Maps("ours", "scratch"))
    plan = Plan(tmp_path / "study.toml", study, "small")
    run_study(plan, None)
    file = plan.out / "seed_0" / name
    for kind in DAMAGES:
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink()
        run_study(plan, None)  # makes it again
        damage(file, kind)
        with pytest.raises(UserError) as refused:
            run_study(plan, None)
        assert str(refused.value).startswith(f"{file} cannot be used ("), kind
        assert "remove it" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_one_seed_supports_no_claim(training: Training, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    (outcome, _) = run_study(plan_of(tmp_path, (0,)), record)
    assert not outcome["holds"]
    assert "comparison" not in {row["kind"] for row in rows_of(record)}


def test_several_seeds_start_from_one_pretraining(training: Training, tmp_path: Path) -> None:
    plan, record = plan_of(tmp_path, (0, 1, 2, 3), pretrain_seeds=2), tmp_path / "rows.jsonl"
    run_study(plan, record)
    assert [row["seed"] for row in rows_of(record) if row["kind"] == "pretrain"] == [0, 1]
    configs = [plan.settings(FinetuneConfig, "ours", seed)[0] for seed in plan.study.seeds]
    assert [Path(config.encoder.weights).parent.name for config in configs] == ["seed_0", "seed_1"] * 2
    assert [config.run.seed for config in configs] == [0, 1, 2, 3]


def compared(
    ours: Sequence[float], hands: npt.NDArray[np.float64] | None = None, pretrain_seeds: int | None = None
) -> Row:
    """Errors of 1 without pre-training; with it, another one for each seed, to which that of a hand (N,) is added."""
    of_hand = np.zeros(HANDS) if hands is None else hands
    groups = np.arange(len(of_hand)) // 4  # four images of a hand

    def measured(plan: Plan, seed: int, name: str) -> Arrays:
        table = np.ones((len(of_hand), 21))
        return {"pa_epe_cm": table + ours[seed] + of_hand[:, None] if name == "ours" else table, "groups": groups}

    plan = plan_of(Path("data"), tuple(range(len(ours))), pretrain_seeds)
    with patch("peclr_dali.experiments.compare.measured_errors", measured):
        return compare(plan, plan.compare[0])


def test_the_interval_holds_the_seeds_variance() -> None:
    outcome = compared([-0.1, -0.2, -0.3])
    # Student's for three numbers: mean -0.2, deviation 0.1, 4.303 for two degrees of freedom.
    assert outcome["mean"] == pytest.approx(-0.2)
    assert (outcome["low"], outcome["high"]) == pytest.approx((-0.2 - 0.2484, -0.2 + 0.2484), abs=1e-3)
    assert not outcome["holds"]


def test_seeds_that_start_from_one_pretraining_count_as_one() -> None:
    outcome = compared([-0.1, -0.2, -0.3, -0.3, -0.2, -0.1, -0.2, -0.2, -0.2], pretrain_seeds=3)
    # means of the three pre-trainings: -0.2, -0.2, -0.2
    three, more = compared([-0.1, -0.2, -0.3]), compared([-0.1, -0.2, -0.3] * 4, pretrain_seeds=3)
    assert (outcome["low"], outcome["high"]) == pytest.approx((-0.2, -0.2))
    assert (more["low"], more["high"]) == pytest.approx((three["low"], three["high"]))


def test_the_interval_holds_the_hands_variance() -> None:
    of_hand = np.random.default_rng(0).normal(size=HANDS)
    outcome = compared([-0.2, -0.2, -0.2], of_hand.repeat(4))
    assert outcome["high"] - outcome["low"] == pytest.approx(2 * 1.96 * of_hand.std() / HANDS**0.5, rel=0.15)


@pytest.mark.parametrize("share_of_seeds", [0.0, 0.5, 1.0])
def test_the_interval_holds_the_truth_as_often_as_it_says(share_of_seeds: float) -> None:
    """Two seeds, and errors of a hand that all seeds share. The true difference is 0."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(trials := 100):
        seeds = rng.normal(size=2) * share_of_seeds
        hands = rng.normal(size=20) * (20 * (1 - share_of_seeds**2) / 2) ** 0.5
        outcome = compared(seeds.tolist(), hands.repeat(4))
        hits += outcome["low"] <= 0 <= outcome["high"]
    assert 0.88 * trials <= hits <= 0.99 * trials


def test_a_network_that_was_trained_again_is_measured_again(training: Training, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, (0,))
    run_study(plan, None)
    file = plan.out / "seed_0" / "errors_finetune_ours.npz"
    for changed, network in ((False, "first"), (True, "second")):
        before = file.stat().st_mtime_ns
        write_network(plan.run_of("ours", 0), network)
        measure.measured_errors(plan, 0, "ours")
        assert (file.stat().st_mtime_ns != before) == changed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "pretrain.simclr_best.set=['equivariance.varient=none']",
            "pretrain.simclr_best at scale small: .*equivariance.variant",
        ),
        ("arms.simclr.set=['train.epochs=many']", "arms.simclr at scale small: .*train.epochs = 'many'"),
        ("scales.small.measured.set=['train.recompute=always']", "arms.simclr .*unknown key train.recompute"),
        (
            "scales.small.pretrain.config=['missing.toml']",
            "peclr at scale small: missing.toml.* count from the",
        ),
        ("pretrain.peclr.set=['run.out=here']", "pretrain.peclr at scale small: set has run.out=here, which the study"),
        ("scales.small.measured.set=['run.seed=1']", "set has run.seed=1, which the study chooses"),
        ("pretrain.peclr.start=simclr", "unknown key pretrain.peclr.start"),
        (
            "arms.peclr.start=moco",
            "arms.peclr.start = 'moco': expected a name in pretrain, or an earlier arm: peclr, simclr_best, simclr$",
        ),
        ("arms.peclr.on=third", "arms.peclr.on = 'third': expected a name in data: first"),
        ("arms.peclr.data=['third']", "peclr.data = 'third': expected a name in data: first"),
        ("arms.peclr.network=none", "arms.peclr.network = 'none': expected a name in arms"),
        ("compare=[{better='a', than='peclr'}]", "compare names 'a': expected a name in arms"),
        ("maps={better='a', than='peclr'}", "maps names 'a': expected a name in arms"),
        ("compare=[{better='peclr', than='peclr'}]", "'peclr' is compared with itself"),
        ("seeds=[1, 1]", "expected each seed once"),
        ("scales.small.by=guess", "scales.small.by = 'guess'"),
        ("pretrain.'a b'={}", "letters, digits"),
        ("scales.small.data.first.held_out=['data.prt=evaluation']", "unknown key data.prt"),
        ("title=''", "title"),
        ("maps={better='peclr', than='simclr', rotations=1000000}", "less than or equal to 1000"),
    ],
)
def test_a_mistake_in_any_arm_is_reported_before_the_first(override: str, message: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "studies" / "compositions.toml"
    with pytest.raises(UserError, match=message):
        load_study(file, [override])


def test_a_second_process_waits_for_the_rendering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call begins while the first renders, and finds the hands."""
    root, begun, made = tmp_path / "data" / "hands", threading.Event(), []

    def make(out: Path, **options: Any) -> None:
        made.append(options["poses"])
        begun.set()
        time.sleep(0.2)
        out.mkdir()

    monkeypatch.setattr(run, "make_dataset", make)
    first = threading.Thread(target=run._render, args=(root, Render(poses=10)))
    first.start()
    assert begun.wait(60)
    run._render(root, Render(poses=10))
    assert root.is_dir()
    first.join()
    assert made == [10]


def test_hands_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"poses": 10, "seed": 1, "scenes": 4, "format": 1}')
    with pytest.raises(UserError, match=r"holds a dataset made with .*'poses': 10.* not with .*'poses': 20"):
        run._render(tmp_path, Render(poses=20, seed=1, scenes=4))


ARM = "[arms.ours]\nstart = 'one'\n"
PAIRS = "set = ['data.positive=file', 'data.pairs=none.csv']\n"


@pytest.mark.parametrize(
    ("arms", "out", "root", "message"),
    [
        (ARM, "images/runs", "images", "images/runs/small is within data.root = images"),
        (ARM, "runs", "missing", "missing: no such folder; expected the images of scales.small.data.first"),
        (
            f"{PAIRS}{ARM}",
            "runs",
            "images",
            "study.toml: pretrain.one: data.pairs = 'none.csv' does not exist; expected",
        ),
        (f"{ARM}only = 'paper'\n", "runs", "images", "has no arm at scale small"),
        ("[arms]\n", "runs", "images", "arms = {}: "),
    ],
)
def test_wrong_folders_and_arms_are_one_line_before_anything_runs(
    arms: str,
    out: str,
    root: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "run_study", lambda *_: pytest.fail("runs"))
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    Path("study.toml").write_text(
        f"title = 'a'\nsource = 'b'\nout = '{out}'\n[pretrain.one]\n{arms}"
        f"[scales.small.data.first]\nroot = '{root}'\nset = ['data.source=folder']\n"
    )
    for options in (["--record", "rows.jsonl"], ["--list"] if root == "images" and PAIRS not in arms else []):
        assert run_cli("experiment", "study.toml", *options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("root", [".", "/", "file"])
def test_what_is_no_dataset_is_not_rendered_into_and_gets_no_lock(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("the user's")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(run, "make_dataset", lambda *_, **options: pytest.fail("renders"))
    run._render(Path(root), Render(poses=10))
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "file"]
    assert not Path("/.lock").exists()


def test_a_pipe_in_place_of_the_lock_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hands.lock")
    with pytest.raises(OSError, match=r"hands\.lock: is a pipe or a device"):
        run._render(tmp_path / "hands", Render(poses=10))

"""Studies: the arms of every item of the paper, what is recorded, when, and what a comparison claims."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.bench.studies import compare as compare_module
from peclr_dali.bench.studies import figure_6, figure_7, measure, other_datasets, run, table_1, tables_2_3
from peclr_dali.bench.studies.compare import Row, compare, tables_of
from peclr_dali.bench.studies.measure import Arrays
from peclr_dali.bench.studies.run import commands_of, run_study
from peclr_dali.bench.studies.scales import Dataset, Scale
from peclr_dali.bench.studies.study import Arm, Claim, Study
from peclr_dali.cli import main
from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.metrics import confidence_intervals
from peclr_dali.train.runs.checkpoint import write_checkpoint
from tests.train import tiny_hands
from tests.train.narrow import narrow_resnet18

FILES = (figure_6, figure_7, other_datasets, table_1, tables_2_3)
STUDIES = [study for file in FILES for of_scale in file.STUDIES.values() for study in of_scale]
EACH = pytest.mark.parametrize("study", STUDIES, ids=lambda study: f"{study.name}-{study.folder.name}")
TOY = (
    "geometry.side_px=16", "encoder.name=resnet18", "encoder.weights=random", "train.batch=4", "train.micro_batch=4",
    "train.epochs=1", "train.threads=1", "pipelines.threads=1", "train.device=cpu", "run.tensorboard=false",
)  # fmt: skip
HANDS = 50


@EACH
def test_the_commands_of_a_study_are_accepted_in_an_order_in_which_each_finds_its_run(study: Study) -> None:
    made = set[str]()
    for line in commands_of(replace(study, seeds=[0])):
        launcher, *words = shlex.split(line)
        processes = int(words.pop(0).removeprefix("--nproc-per-node=")) if launcher == "torchrun" else 1
        assert words[:2] == ["-m", "peclr_dali"]
        given = main.commands[words[2]].make_context(words[2], words[3:]).params
        kind: Any = Config if words[2] == "pretrain" else FinetuneConfig
        config = load_config(kind, given["files"], given["overrides"])
        for rank in range(processes):
            micro_batch_share(config.train.batch, config.train.micro_batch, rank, processes)
        assert given["resume"] == "auto"
        assert config.run.out not in made
        assert config.encoder.weights in {"random", "imagenet", *made}
        made.add(config.run.out)
    assert {str(study.run_of(name, 0)) for name in study.measured} <= made


@EACH
def test_no_two_arms_are_the_same_and_each_claim_compares_two_on_the_same_images(study: Study) -> None:
    trained: list[Config | FinetuneConfig] = [study.pretraining(name, 0)[0] for name in study.pretrain]
    trained += [study.measurement(name, 0)[0] for name, arm in study.measured.items() if arm.network is None]
    texts = [repr(config).replace(repr(config.run.out), "") for config in trained]
    assert len(set(texts)) == len(texts)
    for claim in study.compare:
        assert claim.better != claim.than
        assert study.held_out(claim.better) == study.held_out(claim.than)
    for name in study.measured:
        load_config(FinetuneConfig, (), study.held_out(name))


def test_arms_of_the_same_name_in_the_same_folder_are_the_same() -> None:
    """Their runs are shared by the studies."""
    found: dict[str, str] = {}
    for study in STUDIES:
        trained: list[Config | FinetuneConfig] = [study.pretraining(name, 0)[0] for name in study.pretrain]
        trained += [study.measurement(name, 0)[0] for name, arm in study.measured.items() if arm.network is None]
        for config in trained:
            assert found.setdefault(config.run.out, repr(config)) == repr(config)


def test_pretraining_on_two_sources_sees_each_as_pretraining_on_one_does() -> None:
    mixed = 0
    for study in STUDIES:
        for name, arm in study.pretrain.items():
            if len(arm.data) > 1:
                for dataset, source in zip(arm.data, study.pretraining(name, 0)[0].data, strict=True):
                    alone = replace(study, pretrain={name: replace(arm, data=(dataset,))})
                    assert [source] == list(alone.pretraining(name, 0)[0].data)
                    mixed += 1
    assert mixed > 4


def test_some_arms_run_with_what_they_start_from_and_no_others() -> None:
    (few,) = figure_7.STUDIES["small"]
    some = few.only(["scratch_010", "peclr_010", "peclr_100"])
    assert list(some.measured) == ["scratch_010", "peclr_010", "peclr_100"]
    assert list(some.pretrain) == ["peclr"]
    assert some.compare == [Claim("peclr_010", "scratch_010")]
    assert [data.root for data in some.datasets()] == [".data/studies/hands_3600_300"]
    other = tables_2_3.cross_domain("small").only(["rn152_on_second"])
    assert list(other.measured) == ["rn152_224", "rn152_on_second"]
    assert other_datasets.equivariance("small").only(["peclr"]).maps is None
    with pytest.raises(UserError, match="few_labels has no arm 'peclr'; expected one of scratch_005"):
        few.only(["peclr"])


def test_the_papers_percentages_follow_from_its_figures() -> None:
    """The paper relates a smaller error to the larger one, and a larger AUC to itself."""
    computed = 0
    for study in (study for study in STUDIES if study.folder.name == "paper"):
        for claim in (claim for claim in study.compare if claim.percent is not None):
            better, than = (study.measured[name].published.get(claim.metric) for name in (claim.better, claim.than))
            if better is not None and than is not None:
                assert 100 * abs(better - than) / max(better, than) == pytest.approx(claim.percent, abs=0.1)
                computed += 1
    assert computed == 10


def study_of(root: Path, seeds: Sequence[int] = (0, 1, 2), pretrain_seeds: int | None = None) -> Study:
    return Study(
        "two_arms", at=Scale(Dataset(str(root)), ("encoder.name=resnet18",), ()), folder=root / "runs" / "small",
        pretrain={"peclr": Arm()},
        measured={"ours": Arm(start="peclr"), "scratch": Arm(["encoder.weights=random"])},
        compare=[Claim("ours", "scratch", "pa_epe_cm"), Claim("ours", "scratch", "auc", percent=5)],
        seeds=seeds, pretrain_seeds=pretrain_seeds,
    )  # fmt: skip


def write_network(run_folder: Path, content: str) -> None:
    (run_folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(run_folder / "checkpoints" / "step_000000001.pt", 1, {"content": content})


def errors_of(network: Path, overrides: list[str], *, true_root: bool = False) -> Arrays:
    folder = network.parents[1]
    error = np.full((HANDS, 21), 1.0 + 0.01 * int(folder.parent.name[-1]) - (0.2 if "ours" in folder.name else 0.0))
    return {"pa_epe_cm": error, "epe_px": error, "auc": 1 - error / 5, "groups": np.arange(HANDS)}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of training, a network of a line is written; errors are made up."""
    for name in ("pretrain", "finetune"):
        monkeypatch.setattr(run, name, lambda config, resume: write_network(Path(config.run.out), "first"))
    monkeypatch.setattr(measure, "measure_errors", errors_of)
    monkeypatch.setattr(measure, "load_pose_run", lambda path: path)
    monkeypatch.setattr(run, "measure_constants", lambda overrides: {"rigid_pose": {"pa_epe_cm": 0.9}})


@pytest.mark.usefixtures("training")
def test_rows_are_recorded_once_and_the_tables_are_made_of_them(tmp_path: Path) -> None:
    study, record = study_of(tmp_path, (0, 1, 2, 3), pretrain_seeds=2), tmp_path / "rows.jsonl"
    rows = run_study(study, record)
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["kind"], row.get("arm"), row.get("seed")) for row in recorded] == [
        ("constant", None, None),
        *(("pretrain", "peclr", 0), ("arm", "ours", 0), ("arm", "scratch", 0)),
        *(("pretrain", "peclr", 1), ("arm", "ours", 1), ("arm", "scratch", 1)),
        *((("arm", name, seed)) for seed in (2, 3) for name in ("ours", "scratch")),
        *[("comparison", None, None)] * 2,
    ]  # fmt: skip
    assert recorded[2]["pa_epe_cm"] == pytest.approx(0.8)
    assert [row["set"][-1] for row in recorded if row.get("arm") == "ours"] == [
        f"encoder.weights={tmp_path}/runs/small/seed_{seed % 2}/pretrain_peclr" for seed in range(4)
    ]
    assert run_study(study, record) == rows
    assert len(record.read_text().splitlines()) == len(recorded)
    text = tables_of(study, rows)
    assert "| ours | 0.815 (0.800 to 0.830) |" in text
    assert f"| rigid pose, {tmp_path} | 0.900 |" in text
    assert "| ours minus scratch | PA-EPE, cm | -0.200, -0.200, -0.200, -0.200 | -0.200 |" in text
    assert "| +19.7 % | - | no |" in text  # 0.2 of 1.015, which is worse than the constant
    assert "| +4.8 % | 5 % | - |" in text  # of AUC, 0.04 of 0.837


@pytest.mark.usefixtures("training")
def test_a_network_that_was_trained_again_is_measured_again(tmp_path: Path) -> None:
    study = study_of(tmp_path, (0,))
    run_study(study)
    file = study.folder / "seed_0" / "errors_finetune_ours.npz"
    for changed, network in ((False, "first"), (True, "second")):
        before = file.stat().st_mtime_ns
        write_network(study.run_of("ours", 0), network)
        measure.measured_errors(study, 0, "ours")
        assert (file.stat().st_mtime_ns != before) == changed


@pytest.mark.usefixtures("training")
def test_one_seed_supports_no_claim(tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    assert not run_study(study_of(tmp_path, (0,)), record)[-2]["holds"]
    assert '"comparison"' not in record.read_text()


def compared(
    ours: Sequence[float], hands: npt.NDArray[np.float64] | None = None, pretrain_seeds: int | None = None
) -> Row:
    """Errors of 1 without pre-training; with it, another one for each seed, to which that of a hand (N,) is added."""
    of_hand = np.zeros(HANDS) if hands is None else hands
    groups = np.arange(len(of_hand)) // 4  # four images of a hand

    def measured(study: Study, seed: int, name: str) -> Arrays:
        table = np.ones((len(of_hand), 21))
        return {"pa_epe_cm": table + ours[seed] + of_hand[:, None] if name == "ours" else table, "groups": groups}

    study = study_of(Path("data"), range(len(ours)), pretrain_seeds)
    with patch.object(compare_module, "measured_errors", measured):
        return compare(study, study.compare[0])


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


def test_the_interval_of_seeds_and_hands_is_the_root_of_two_squares() -> None:
    of_hand, ours = np.random.default_rng(0).normal(size=HANDS), [-0.1, -0.2, -0.3]
    found = compared(ours, of_hand)
    over_seeds = interval_of_mean([one + of_hand.mean() for one in ours])
    table = np.tile(of_hand[:, None], 21)
    hands = confidence_intervals({"m": table}, groups=np.arange(HANDS) // 4)["m"]
    reach = np.hypot(over_seeds.high - over_seeds.mean, (hands.high - hands.low) / 2)
    assert found["high"] - found["mean"] == pytest.approx(reach)


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("hands")
    tiny_hands.write_hands(root, poses=8)
    with narrow_resnet18(), patch("peclr_dali.train.trainer.save_views"):
        yield root


def toy(study: Study, hands: Path, folder: Path, names: Sequence[str]) -> Study:
    """Some arms of a study at toy size."""
    data = Dataset(str(hands), held_out=("data.split=all",))

    def small(arm: Arm) -> Arm:
        kept = [key for key in arm.keys if not key.startswith("train.epochs")]
        if any(key.startswith("pose.features") for key in kept):
            kept.append("train.frozen=true")
        return replace(arm, keys=kept, data=(data,) * len(arm.data), on=arm.on and data)

    some = study.only(names)
    return replace(
        some,
        at=Scale(data, TOY, TOY),
        folder=folder / "small",
        pretrain={name: small(arm) for name, arm in some.pretrain.items()},
        measured={name: small(arm) for name, arm in some.measured.items()},
    )


@pytest.mark.parametrize(
    ("study", "names", "seeds"),
    [
        (table_1.compositions("small"), ("peclr", "simclr"), (0, 1)),
        (tables_2_3.cross_domain("small"), ("rn152_peclr_on_second", "rn152_on_second"), (0,)),
        (other_datasets.equivariance("small"), ("peclr", "simclr"), (0,)),
        (figure_7.few_labels(), ("cells_version", "cells_peclr"), (0,)),
    ],
    ids=lambda value: value.name if isinstance(value, Study) else None,
)
def test_each_way_through_a_study_runs_at_toy_size(
    study: Study,
    names: Sequence[str],
    seeds: Sequence[int],
    hands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "ANGLES_DEG", np.linspace(-80, 80, 2))
    monkeypatch.setattr(measure, "SHIFTS_PX", np.linspace(-25, 25, 2))
    some, record = replace(toy(study, hands, tmp_path, names), seeds=seeds), tmp_path / "rows.jsonl"
    rows = run_study(some, record)
    assert all(np.isfinite(row["differences"]).all() for row in rows if row["kind"] == "comparison")
    assert {row["arm"] for row in rows if row["kind"] == ("map" if study.maps else "arm")} >= set(names)
    assert tables_of(some, rows).count("| --- |") >= 1 + bool(some.compare) + bool(some.maps)
    recorded = record.read_text()
    assert run_study(some, record) == rows
    assert record.read_text() == recorded


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["figure_7", *arguments])
    with pytest.raises(SystemExit) as leaving:
        run.main(figure_7.STUDIES)
    return int(leaving.value.code or 0)


def test_the_command_lists_its_runs_and_names_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_arm = ["--scale", "paper", "--study", "label_fractions", "--arm", "two_010"]
    settings = ["--seeds", "3", "-c", "configs/cards/h100.toml", "--set", "run.keep=2"]
    assert called(monkeypatch, *of_arm, *settings, "--list") == 0
    pretraining, finetuning = capsys.readouterr().out.splitlines()
    assert pretraining.startswith("torchrun --nproc-per-node=8 -m peclr_dali pretrain -c configs/peclr_rn152.toml ")
    assert "-c configs/cards/h100.toml" in pretraining
    assert "--set data.1.root=data/youtube3d --set data.1.source=youtube3d" in pretraining
    assert "--set run.seed=3" in finetuning
    assert pretraining.count("--set run.keep=2") == finetuning.count("--set run.keep=2") == 1
    for wrong, message in (
        (["--arm", "two"], "few_labels has no arm 'two'"),
        (["--arm", "scratch_010", "--set", "optim.rate=1", "--list"], "unknown key optim.rate"),
        (["--seeds", "1,x"], "'x' is not a valid integer"),
        (["--record", "/dev/null"], "--record /dev/null: "),
    ):
        assert called(monkeypatch, *wrong) == 2
        assert message in capsys.readouterr().err

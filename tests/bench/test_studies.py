"""Studies: the arms of every item of the paper, what is recorded, when, and what a comparison claims."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from peclr_dali.bench.studies import figure_6, figure_7, measure, other_datasets, run, table_1, tables_2_3
from peclr_dali.bench.studies import study as study_module
from peclr_dali.bench.studies.measure import Arrays, Row, compare
from peclr_dali.bench.studies.run import run_and_record
from peclr_dali.bench.studies.study import Arm, Claim, Dataset, Scale, Study
from peclr_dali.cli import main
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
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
    for _, _, one in replace(study, seeds=[0]).runs():
        launcher, *words = shlex.split(one.shell_command(study.at.processes))
        processes = 1
        if launcher == "torchrun":
            assert words.pop(0) == "--standalone"
            processes = int(words.pop(0).removeprefix("--nproc-per-node="))
        assert words[:2] == ["-m", "peclr_dali"]
        given = main.commands[words[2]].make_context(words[2], words[3:]).params
        kind: Any = Config if words[2] == "pretrain" else FinetuneConfig
        config = load_config(kind, given["files"], given["overrides"])
        for rank in range(processes):
            micro_batch_share(config.train.batch, config.train.micro_batch, rank, processes)
        assert given["resume"] == "auto"
        assert config == one.config
        assert config.encoder.weights in {"random", "imagenet", *made}
        made.add(config.run.out)


@EACH
def test_no_two_arms_are_the_same_and_each_claim_compares_two_on_the_same_images(study: Study) -> None:
    runs = {one.out: one.config for _, _, one in replace(study, seeds=[0]).runs()}
    texts = [repr(config).replace(repr(config.run.out), "") for config in runs.values()]
    assert len(set(texts)) == len(texts)
    for claim in study.compare:
        assert claim.better != claim.than
        assert study.held_out(claim.better) == study.held_out(claim.than)
    for name in study.measured:
        load_config(FinetuneConfig, (), study.held_out(name))


def test_arms_of_the_same_name_in_the_same_folder_are_the_same() -> None:
    """Their runs are shared by the studies."""
    found: dict[Path, str] = {}
    for study in STUDIES:
        for _, _, one in replace(study, seeds=[0]).runs():
            assert found.setdefault(one.out, repr(one)) == repr(one)


def test_pretraining_on_two_sources_sees_each_as_pretraining_on_one_does() -> None:
    study = tables_2_3.high_resolution()
    both, arm = study.pretraining("two", 0).config.data, study.pretrain["two"]
    for dataset, source in zip(arm.data, both, strict=True):
        alone = replace(study, pretrain={"two": replace(arm, data=(dataset,))})
        assert [source] == list(alone.pretraining("two", 0).config.data)


def test_some_arms_run_with_what_they_start_from_and_no_others() -> None:
    some = figure_7.few_labels().only(["scratch_010", "peclr_010", "peclr_100"])
    assert list(some.measured) == ["scratch_010", "peclr_010", "peclr_100"]
    pretrained = [one for one in replace(some, seeds=(0, 3)).runs() if one[2].command == "pretrain"]
    assert [(name, seed) for name, seed, _ in pretrained] == [("peclr", 0)]
    assert some.compare == [Claim("peclr_010", "scratch_010")]
    other = tables_2_3.cross_domain().only(["rn152_on_second"])
    assert list(other.measured) == ["rn152_224", "rn152_on_second"]


def test_the_papers_percentages_follow_from_its_figures() -> None:
    """The paper relates a smaller error to the larger one, and a larger AUC to itself."""
    computed = 0
    for study in (study for study in STUDIES if study.folder.name == "paper"):
        for claim in study.compare:
            better, than = (study.measured[name].published.get(claim.metric) for name in (claim.better, claim.than))
            if better is not None and than is not None and claim.percent is not None:
                assert 100 * abs(better - than) / max(better, than) == pytest.approx(claim.percent, abs=0.1)
                computed += 1
    assert computed == 10


def study_of(root: Path, seeds: Sequence[int] = (0, 1, 2), pretrain_seeds: int | None = None) -> Study:
    return Study(
        "two_arms", Scale(Dataset(str(root)), ["encoder.name=resnet18"]), root / "runs" / "small",
        pretrain={"peclr": Arm()},
        measured={"ours": Arm(start="peclr"), "scratch": Arm(["encoder.weights=random"])},
        compare=[Claim("ours", "scratch", "pa_epe_cm"), Claim("ours", "scratch", "auc", percent=5)],
        seeds=seeds, pretrain_seeds=pretrain_seeds,
    )  # fmt: skip


def write_network(run_folder: Path) -> None:
    (run_folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(run_folder / "checkpoints" / "step_000000001.pt", 1, {})


def errors_of(network: Path, overrides: list[str]) -> Arrays:
    folder = network.parents[1]
    error = np.full((HANDS, 21), 1.0 + 0.01 * int(folder.parent.name[-1]) - (0.2 if "ours" in folder.name else 0.0))
    return {"pa_epe_cm": error, "epe_px": error, "auc": 1 - error / 5, "groups": np.arange(HANDS)}


def test_rows_are_recorded_once_and_the_tables_are_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of training, an empty network is written; errors are made up."""
    for name in ("pretrain", "finetune"):
        monkeypatch.setattr(study_module, name, lambda config, resume: write_network(Path(config.run.out)))
    monkeypatch.setattr(measure, "measure_errors", errors_of)
    monkeypatch.setattr(measure, "load_pose_run", lambda path: path)
    for module in (run, measure):
        monkeypatch.setattr(module, "measure_constants", lambda *overrides: {"rigid_pose": {"pa_epe_cm": 0.9}})
    study, record = study_of(tmp_path, (0, 1, 2, 3), pretrain_seeds=2), tmp_path / "rows.jsonl"
    text = run_and_record(study, record)
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
    assert run_and_record(study, record) == text
    assert len(record.read_text().splitlines()) == len(recorded)
    lines = [re.sub(" +", " ", line) for line in text.splitlines()]
    assert "| ours | 0.815 (0.800 to 0.830) | 0.837 (0.834 to 0.840) | 0.815 (0.800 to 0.830) |" in lines
    assert any(line.startswith(f"| rigid pose, {tmp_path} | 0.900 ") for line in lines)
    # of 1.015 cm, which is worse than the constant; and 0.04 of an AUC of 0.837
    assert "| ours minus scratch | PA-EPE, cm | -0.200 | -0.200 to -0.200 | +19.7 % | - | no |" in lines
    assert "| ours minus scratch | AUC | +0.040 | +0.040 to +0.040 | +4.8 % | 5 | - |" in lines


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
    with patch.object(measure, "measured", measured), patch.object(measure, "measure_constants", return_value={}):
        return compare(study, study.compare[0])


def test_seeds_that_start_from_one_pretraining_count_as_one() -> None:
    """Three pre-trainings with means of -0.2, -0.2 and -0.2; and four times the same three differences."""
    outcome = compared([-0.1, -0.2, -0.3, -0.3, -0.2, -0.1, -0.2, -0.2, -0.2], pretrain_seeds=3)
    assert (outcome["low"], outcome["high"]) == pytest.approx((-0.2, -0.2))
    three, more = compared([-0.1, -0.2, -0.3]), compared([-0.1, -0.2, -0.3] * 4, pretrain_seeds=3)
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
        (tables_2_3.cross_domain(), ("rn152_peclr_on_second", "rn152_on_second"), (0,)),
        (other_datasets.equivariance("small"), ("peclr", "simclr"), (0,)),
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
    text = run_and_record(some, record)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    compared = [row["differences"] for row in rows if row["kind"] == "comparison"]
    assert len(compared) == (len(some.compare) if len(seeds) > 1 else 0)  # one seed supports no claim
    assert np.isfinite(compared).all()
    assert {row["arm"] for row in rows if row["kind"] == ("map" if study.maps else "arm")} >= set(names)
    assert ("rotated, px of 128" in text) == study.maps
    recorded = record.read_text()
    assert run_and_record(some, record) == text
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
    assert pretraining.startswith(
        "torchrun --standalone --nproc-per-node=8 -m peclr_dali pretrain -c configs/peclr_rn152.toml "
    )
    assert "-c configs/cards/h100.toml" in pretraining
    assert "--set data.1.root=data/youtube3d --set data.1.source=youtube3d" in pretraining
    assert "--set run.seed=3" in finetuning
    assert pretraining.count("--set run.keep=2") == finetuning.count("--set run.keep=2") == 1
    for wrong, message in (
        (["--arm", "two"], "there is no arm 'two'; expected one of scratch_005, "),
        (["--arm", "scratch_010", "--set", "optim.rate=1", "--list"], "unknown key optim.rate"),
        (["--seeds", "1,x"], "'x' is not a valid integer"),
    ):
        assert called(monkeypatch, *wrong) == 2
        assert message in capsys.readouterr().err

"""The files of configs/studies: their commands, their runs at toy size, and the published figures in them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from peclr_dali.cli import main
from peclr_dali.errors import UserError
from peclr_dali.experiments.commands import commands_of
from peclr_dali.experiments.config import MeasuredArm, Plan, load_study
from peclr_dali.experiments.run import run_study
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from tests.train import tiny_hands
from tests.train.narrow import narrow_resnet18

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "studies").glob("*.toml"))

TOY = (
    "geometry.side_px=16", "encoder.name=resnet18", "encoder.weights=random", "train.batch=4", "train.micro_batch=4",
    "train.epochs=1", "train.threads=1", "pipelines.threads=1", "train.device=cpu", "run.tensorboard=false",
)  # fmt: skip


def plans(file: Path, *overrides: str) -> list[Plan]:
    """A study at each of its scales."""
    study = load_study(file, overrides)
    return [Plan(file, study, scale) for scale in study.scales]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_are_accepted(file: Path) -> None:
    for plan in plans(file, "seeds=[0]"):
        check_commands(plan)
        assert all(claim.title for claim in plan.study.compare if claim.claimed)  # in plain words, for the picture


def check_commands(plan: Plan) -> None:
    """The real commands and the configuration accept them, in an order in which each finds its run."""
    made, measured = set[str](), 0
    for line in commands_of(plan, ["seeds=[0]"]):
        if line.startswith("#"):
            continue
        launcher, *words = shlex.split(line)
        processes = int(words.pop(0).removeprefix("--nproc-per-node=")) if launcher == "torchrun" else 1
        assert words.pop(0) == "cli.py"
        command, arguments = main.commands[words[0]], words[1:]
        given = command.make_context(words[0], list(arguments)).params
        assert "regressor" not in line or words[0] == "evaluate"  # only this needs keypoints of YouTube3DHands
        if words[0] in ("pretrain", "finetune", "probe"):
            kind: Any = Config if words[0] == "pretrain" else FinetuneConfig
            config = load_config(kind, given["files"], given["overrides"])
            assert given["resume"] == "auto"
            for rank in range(processes):
                micro_batch_share(config.train.batch, config.train.micro_batch, rank, processes)
            assert config.run.out not in made
            assert config.encoder.weights in {"random", "imagenet", *made}
            made.add(config.run.out)
        elif words[0] == "evaluate":
            assert str(given["run"]) in made
            load_config(FinetuneConfig, given["files"], given["overrides"])
            measured += 1
        else:
            assert words[0] in ("make-data", "experiment")
    assert measured == len(plan.arms)
    assert all(plan.scale == "small" or "small" not in path for path in made)


def test_some_arms_run_with_what_they_start_from_and_no_others() -> None:
    file = ROOT / "configs" / "studies" / "few_labels.toml"
    plan = Plan(file, load_study(file), "small", ["scratch_010", "peclr_010", "peclr_100"])
    assert list(plan.arms) == ["scratch_010", "peclr_010", "peclr_100"]
    assert list(plan.pretrain) == ["peclr"]
    assert {(claim.better, claim.than) for claim in plan.compare} == {("peclr_010", "scratch_010")}
    assert list(plan.used_data()) == ["first"]
    *_, last = commands_of(plan, (), ["scratch_010"])
    assert "--arm scratch_010" in last


def test_pretraining_on_two_sources_sees_each_as_pretraining_on_one_does() -> None:
    """The keys of `data` in the configuration files count for every dataset."""
    mixed = 0
    for plan in (plan for file in FILES for plan in plans(file)):
        for name, arm in plan.pretrain.items():
            sources = plan.settings(Config, name, 0)[0].data
            if isinstance(sources, DataConfig):
                continue
            for dataset, source in zip(arm.data, sources, strict=True):
                one = dataclasses.replace(arm, data=(dataset,))
                study = dataclasses.replace(plan.study, pretrain={"one": one}, arms={"one": MeasuredArm(start="one")})
                assert source == Plan(plan.file, study, plan.scale).settings(Config, "one", 0)[0].data
                mixed += 1
    assert mixed > 4


def test_an_arm_brings_the_one_whose_network_it_measures() -> None:
    file = ROOT / "configs" / "studies" / "cross_domain.toml"
    assert list(Plan(file, load_study(file), "small", ["rn152_on_second"]).arms) == ["rn152_224", "rn152_on_second"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_two_arms_are_the_same(file: Path) -> None:
    for plan in plans(file):
        trained: list[Config | FinetuneConfig] = [plan.settings(Config, name, 0)[0] for name in plan.pretrain]
        trained += [plan.settings(FinetuneConfig, name, 0)[0] for name, arm in plan.arms.items() if arm.network is None]
        texts = [repr(settings).replace(repr(settings.run.out), "") for settings in trained]
        assert len(set(texts)) == len(texts), plan.scale


def test_maps_need_both_arms() -> None:
    file = ROOT / "configs" / "studies" / "equivariance.toml"
    assert Plan(file, load_study(file), "small").maps is not None
    assert Plan(file, load_study(file), "small", ["peclr"]).maps is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms.rn152_on_second.on=first", "rn152_peclr_on_second is measured on second, rn152_on_second on first"),
        (
            "arms.rn152_on_second.set=['train.epochs=1']",
            "rn152_on_second.network = 'rn152_224': expected an arm",
        ),
        ("arms.rn152_224.data=['first', 'second']", "arms.rn152_224.data = .*at most 1 item"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_study(ROOT / "configs" / "studies" / "cross_domain.toml", [override])


def test_an_arm_of_the_other_scale_is_refused() -> None:
    file = ROOT / "configs" / "studies" / "high_resolution.toml"
    with pytest.raises(UserError, match="at scale small: --arm 'rn50_224': expected a name in arms: rn152_224"):
        Plan(file, load_study(file), "small", ["rn50_224"])


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("hands")
    tiny_hands.write_hands(root, poses=8)
    with narrow_resnet18(), patch("peclr_dali.train.trainer.save_views"):
        yield root


def toy(file: Path, hands: Path, out: Path, number: int) -> Plan:
    """A study at toy size: the two measured arms of a comparison, with what they start from."""
    study = load_study(file)
    settings = [f"scales.small.data.{name}.root={hands}" for name in study.scales["small"].data]
    settings += [f"scales.small.data.{name}.held_out=['data.split=all']" for name in study.scales["small"].data]
    for name, dataset in study.scales["small"].data.items():
        kept = [key for key in dataset.set if not key.startswith(("data.source", "data.box", "data.split"))]
        settings.append(f"scales.small.data.{name}.set={kept}")
    for kind in ("pretrain", "measured"):
        settings += [f"scales.small.{kind}.config=[]", f"scales.small.{kind}.set={list(TOY)}"]
    for table, arms in (("pretrain", study.pretrain), ("arms", study.arms)):
        settings += [f"{table}.{name}.set_at.small=[]" for name in arms]  # epochs, among others
        for name, arm in arms.items():
            of_size = ("train.batch", "train.micro", "train.epochs", "data.box")
            kept = [key for key in arm.set if not key.startswith(of_size)]
            if any(key.startswith("pose.features") for key in kept):
                kept.append("train.frozen=true")  # as in the files that are left out
            settings.append(f"{table}.{name}.set={kept}")
    if study.maps is not None:
        settings += ["maps.rotations=2", "maps.translations=2"]
    seeds = "seeds=[0, 1]" if file.stem == "compositions" else "seeds=[0]"
    study = load_study(file, [*settings, seeds, f"out={out}"])
    whole = Plan(file, study, "small")
    compared = whole.compare[number] if whole.compare else whole.maps
    assert compared is not None
    return Plan(file, study, "small", [compared.better, compared.than])


def arms_on_other_data(file: Path) -> Iterator[int]:
    """Number of the first comparison between arms that are measured on other data than they were trained on."""
    plan = Plan(file, load_study(file), "small")
    yield from [number for number, claim in enumerate(plan.compare) if plan.arms[claim.better].on][:1]


QUICK = {"compositions", "cross_domain", "equivariance"}
"""Two seeds, arms on other data, maps: each way through the code. The other studies run in `make test-long`."""


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=() if file.stem in QUICK else pytest.mark.slow)
        for file in FILES
        if "small" in load_study(file).scales
    ],
)
def test_every_study_runs_at_toy_size(file: Path, hands: Path, tmp_path: Path) -> None:
    for number in {0, *arms_on_other_data(file)}:
        plan, record = toy(file, hands, tmp_path / str(number), number), tmp_path / f"{number}.jsonl"
        outcomes = run_study(plan, record)
        assert len(outcomes) == len(plan.compare)
        assert all(np.isfinite(outcome["differences"]).all() for outcome in outcomes)
        rows = record.read_text()
        assert '"mean_keypoints_epe_px"' in rows
        assert run_study(plan, record) == outcomes
        assert record.read_text() == rows


PUBLISHED: dict[tuple[str, str], dict[str, float]] = {
    # SimCLR      &  16.62       & 0.72     & 12.05    \\
    ("compositions", "simclr"): {"epe_cm": 16.62, "auc": 0.72, "epe_px": 12.05},
    # PeCLR  (\textbf{ours})           &  \bf 16.05    & \bf 0.74  & \bf 10.51 \\
    ("compositions", "peclr"): {"epe_cm": 16.05, "auc": 0.74, "epe_px": 10.51},
    # RN50                                        & 0.83          & 0.84      \\
    ("high_resolution", "rn50_224"): {"pa_epe_cm": 0.83, "pa_auc": 0.84},
    # ~~~ + PeCLR (\bf ours)                      & 0.71          & 0.86      \\
    ("high_resolution", "rn50_224_peclr"): {"pa_epe_cm": 0.71, "pa_auc": 0.86},
    # RN152                                       & 0.74          & 0.85      \\
    ("high_resolution", "rn152_224"): {"pa_epe_cm": 0.74, "pa_auc": 0.85},
    # ~~~ + PeCLR (\bf ours)                    & \bf 0.66      & \bf 0.87  \\
    ("high_resolution", "rn152_224_peclr"): {"pa_epe_cm": 0.66, "pa_auc": 0.87},
    # RN152                           &   5.05        &   0.34                            \\
    ("cross_domain", "rn152_224"): {"epe_cm": 5.05, "auc": 0.34},
    # ~~~ + \methodname (\textbf{ours})    &   \bf 4.56    &   \bf 0.36          \\
    ("cross_domain", "rn152_224_peclr"): {"epe_cm": 4.56, "auc": 0.36},
    # RN152                           &   3.05        &   22.1                           \\
    ("cross_domain", "rn152_on_second"): {"pa_epe_cm": 3.05, "epe_px": 22.1},
    # ~~~ + \methodname (\textbf{ours})    &   \bf 2.88    &   \bf 16.9        \\
    ("cross_domain", "rn152_peclr_on_second"): {"pa_epe_cm": 2.88, "epe_px": 16.9},
    # Supervised                  &   1.33                &   0.74            & 2.85              & 0.50
    ("other_datasets", "ho3d"): {"pa_epe_cm": 1.33, "pa_auc": 0.74, "epe_cm": 2.85, "auc": 0.50},
    # \methodname (\textbf{ours})          &   \bf 1.09 & \bf 0.78 & \bf 2.26 & \bf 0.58
    ("other_datasets", "ho3d_peclr"): {"pa_epe_cm": 1.09, "pa_auc": 0.78, "epe_cm": 2.26, "auc": 0.58},
    # Supervised                                                          & 0.77      \\
    ("other_datasets", "dexter"): {"pa_auc": 0.77},
    # PeCLR (Ours)                                                        & 0.81      \\
    ("other_datasets", "dexter_peclr"): {"pa_auc": 0.81},
}
"""The paper's figures, with the lines of its source."""

PERCENT: dict[tuple[str, str, str], float] = {
    # \methodname yields significant improvements of $34\%$ and $57\%$ relative to SimCLR, respectively.
    ("geometric", "translation_peclr", "epe_px"): 34,
    ("geometric", "rotation_peclr", "epe_px"): 57,
    # gaining the improvements of $3.4\%$ in terms of 3D EPE and $12.8\%$ in terms of 2D EPE.
    ("compositions", "peclr", "epe_cm"): 3.4,
    ("compositions", "peclr", "epe_px"): 12.8,
    # yielding improvements of up to $43\%$ in 3D EPE in the lowest labeled setting
    ("label_fractions", "two_010", "epe_cm"): 43,
    # in the $20\%$ labeled setting, by using FH and YT3D for pre-training the RN152 model can gain an improvement of
    # $20\%$ in 3D EPE with respect $M_{FH}$
    ("label_fractions", "two_020", "epe_cm"): 20,
    # we yield a performance increase of $14.5\%$ / $10.8\%$ for RN50 and RN152 respectively
    ("high_resolution", "rn50_224_peclr", "pa_epe_cm"): 14.5,
    ("high_resolution", "rn152_224_peclr", "pa_epe_cm"): 10.8,
    # Improvement                     &   9.7 \%        &   5.6 \%                            \\
    ("cross_domain", "rn152_224_peclr", "epe_cm"): 9.7,
    ("cross_domain", "rn152_224_peclr", "auc"): 5.6,
    # Improvement             &   5.6 \%       &   23.5 \%                           \\
    ("cross_domain", "rn152_peclr_on_second", "pa_epe_cm"): 5.6,
    ("cross_domain", "rn152_peclr_on_second", "epe_px"): 23.5,
    # and note an improvement of $18\%$ in 3D PA-EPE.
    ("other_datasets", "ho3d_peclr", "pa_epe_cm"): 18,
    # However, PeCLR yields improvements of $4.9\%$, almost reaching parity with state-of-the-art ($0.81$ AUC).
    ("other_datasets", "dexter_peclr", "pa_auc"): 4.9,
}
"""By how many percent the paper's arm is better."""


def test_the_published_figures_are_the_paper_s_and_its_percentages_follow() -> None:
    """The paper relates a smaller error to the larger one, and a larger AUC to itself."""
    studies = {file.stem: load_study(file) for file in FILES}
    arms = {(name, arm): dict(one.published) for name, study in studies.items() for arm, one in study.arms.items()}
    assert {arm: figures for arm, figures in arms.items() if figures} == PUBLISHED
    claims = [(name, claim) for name, study in studies.items() for claim in study.compare if claim.percent is not None]
    assert {(name, claim.better, claim.metric): claim.percent for name, claim in claims} == PERCENT
    compared = set()
    for name, claim in claims:
        figures = [PUBLISHED.get((name, arm), {}).get(claim.metric, 0.0) for arm in (claim.better, claim.than)]
        if all(figures):
            assert 100 * abs(figures[0] - figures[1]) / max(figures) == pytest.approx(claim.percent, abs=0.1)
            compared.add(name)
    assert compared == {"compositions", "high_resolution", "cross_domain", "other_datasets"}

"""Studies: the runs of every item of the paper, what is recorded, when, and what the command does."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from peclr_dali.bench.rows import study_tables
from peclr_dali.bench.studies import card, figure_6_table_1, figure_7, scales, study, tables_2_3, to_the_end
from peclr_dali.bench.studies.study import Claim, Network, Scale, Study
from peclr_dali.ranks import Ranks
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation import equivariance_maps
from peclr_dali.train.pose.metrics import METRICS
from tests.command_line import as_options
from tests.train.narrow import narrow_resnet18

STUDIES = [
    (name, function, scale)
    for file in (card, figure_6_table_1, figure_7, tables_2_3, to_the_end)
    for name, functions in file.STUDIES.items()
    for function, scale in functions.items()
]
SHIPPED = "networks/peclr_rn18.safetensors"
Configs = dict[str, Any]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Configs:
    """Nothing is rendered, trained and measured; these are the configurations, by folder, in the order of training."""
    trained: Configs = {}

    def train(config: Any, resume: str) -> Any:
        assert resume == "auto"
        trained[config.run.out] = config
        return SimpleNamespace(read_validations=lambda: [{"step": 1, "epe_px_of_224": 40.0}])

    def errors(network: Network) -> dict[str, Any]:
        """Each hand has an error of 1, and a hundredth more for each seed; less from a pre-training."""
        error = np.full((50, 21), 1.0 + 0.01 * network.seed - (0.2 if network.start else 0.0))
        tables = {name: 1 - error / 5 if metric.higher_is_better else error for name, metric in METRICS.items()}
        maps = {"rotation_error_px": np.array([4.0, 2.0])} if network.maps else {}
        return {**tables, "groups": np.arange(50), **maps}

    def constants(on: tuple[str, ...]) -> dict[str, Any]:
        root = on[0].removeprefix("data.root=")
        return {"kind": "constant", "on": root, "constants": {"rigid_pose": {"pa_epe_cm": 0.9}}}

    for name in ("pretrain", "finetune"):
        monkeypatch.setattr(study, name, train)
    monkeypatch.setattr(study, "measure_constants", constants)
    monkeypatch.setattr(study, "make_dataset", lambda **options: None)
    monkeypatch.setattr(Network, "measured", errors)
    return trained


def run(function: Any, scale: Scale, configs: Configs, **options: Any) -> Study:
    """Call a study as the command does."""
    made = Study(function.__name__, scale, **options)
    function(made)
    made.run()
    return made


def test_every_study_trains_what_it_compares(configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two runs of a study are the same; networks start from ImageNet, random numbers or what was trained before."""
    monkeypatch.chdir(tmp_path)  # for the lock of the hands
    shared: Configs = {}
    computed = 0
    for name, function, scale in STUDIES:
        configs.clear()
        made = run(function, scale, configs, seeds=[0])
        assert scale.folder.name == name
        for number, config in enumerate(configs.values()):
            assert config.encoder.weights in {"random", "imagenet", SHIPPED, *[*configs][:number]}
        assert len({repr(config).replace(repr(out), "") for out, config in configs.items()}) == len(configs)
        assert all(shared.setdefault(out, config) == config for out, config in configs.items())
        published = {row["arm"]: row["published"] for row in made.rows if row["kind"] == "arm"}
        on = {network.arm: network.on for network in made.networks}
        assert published.keys() == on.keys()
        for row in made.rows:
            if row["kind"] == "comparison":
                better, than = row["better"], row["than"]
                assert better != than
                assert on[better] == on[than]
                figures = [published[arm].get(row["metric"], math.nan) for arm in (better, than)]
                percent = 100 * abs(figures[0] - figures[1]) / max(figures)  # of a larger error, or a larger AUC
                if row["published_percent"] is not None and not math.isnan(percent):
                    assert percent == pytest.approx(row["published_percent"], abs=0.1)
                    computed += 1
    assert computed == 12, "percentages follow from the published figures"


def test_pre_training_is_as_shipped(configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the card but for data, weights at the start, and what is saved and probed; and on two sources."""
    monkeypatch.chdir(tmp_path)
    run(card.card, card.CARD, configs)
    for arm in ("peclr", "simclr"):
        files = [Path(f"configs/{arm}_rn50.toml"), Path("configs/cards/h100.toml")]
        shipped = load_config(Config, files, ["encoder.weights=random"])
        made = configs[f"runs/studies/card/paper/seed_0/pretrain_{arm}"]
        assert replace(made, run=shipped.run, data=shipped.data, probe=shipped.probe) == shipped
    configs.clear()
    run(figure_7.label_fractions, scales.RN152, configs)
    both = load_config(Config, [Path("configs/peclr_rn152.toml"), Path("configs/both_datasets.toml")], [])
    assert replace(configs["runs/studies/pose/paper/seed_0/pretrain_two"], run=both.run) == both


def two_arms(made: Study) -> None:
    """Four seeds from two pre-trainings, and on other images too."""
    for seed in made.seeds or (0, 1, 2, 3):
        ours = made.finetune("ours", seed, start=made.pretrain("peclr", seed % 2), published={"auc": 0.5}, maps=True)
        made.measure("elsewhere", ours, (*made.scale.held_out, "data.split=all"), {})
        made.finetune("scratch", seed)
    made.compare(Claim("ours", "scratch", "pa_epe_cm"), Claim("ours", "scratch", "auc", percent=5))


def test_rows_are_recorded_once_and_the_tables_are_made_of_them(configs: Configs, tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    scale = Scale(tmp_path / "small", ("encoder.weights=random",), (), (f"data.root={tmp_path}",))
    options = {"only": ["ours", "scratch"], "record": record}
    made = run(two_arms, scale, configs, **options)
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["kind"], row.get("seed")) for row in recorded] == [
        ("constant", None), ("pretrain", 0), ("arm", 0), ("arm", 0), ("pretrain", 1),
        *(("arm", seed) for seed in (1, 1, 2, 2, 3, 3)), ("comparison", None), ("comparison", None),
    ]  # fmt: skip
    assert recorded[1]["probe_epe_px"] == [40.0]
    assert recorded[2]["rotation_error_px"] == [4.0, 2.0]
    assert [row["kind"] for row in made.rows].count("pretrain") == 2
    assert [row["set"][-1] for row in recorded if row.get("arm") == "ours" and row["kind"] == "arm"] == [
        f"encoder.weights={tmp_path}/small/seed_{seed % 2}/pretrain_peclr" for seed in range(4)
    ]
    text = study_tables(made.rows)
    assert study_tables(run(two_arms, scale, configs, **options).rows) == text
    run(two_arms, scale, configs, seeds=[0, 2], **options)  # of one pre-training
    assert len(record.read_text().splitlines()) == len(recorded)
    lines = [re.sub(" +", " ", line) for line in text.splitlines()]
    assert any(line.startswith("| ours | 0.815 (0.800 to 0.830) | 0.837 (0.834 to 0.840) | ") for line in lines)
    assert any(" 0.837 (0.834 to 0.840); 0.5 |" in line for line in lines)
    assert any(line.startswith(f"| rigid_pose, {tmp_path} | 0.900 ") for line in lines)
    # of 1.015 cm, which is worse than the constant; and 0.04 of an AUC of 0.837
    assert "| ours minus scratch | PA-EPE, cm | -0.200 | -0.200 to -0.200 | +19.7 % | - | no |" in lines
    assert "| ours minus scratch | AUC | +0.040 | +0.040 to +0.040 | +4.8 % | 5 | - |" in lines


def test_under_torchrun_it_only_pre_trains(configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "described_ranks", lambda: Ranks(world_size=2))
    scale = Scale(tmp_path / "small", ("encoder.weights=random",), (), (f"data.root={tmp_path}",))
    assert [row["kind"] for row in run(two_arms, scale, configs, seeds=[0]).rows] == [
        "constant",
        "constant",
        "pretrain",
    ]


TINY = (
    "geometry.side_px=16", "encoder.name=resnet18", "encoder.weights=random", "train.batch=4", "train.micro_batch=4",
    "train.epochs=1", "train.threads=1", "pipelines.threads=1", "train.device=cpu", "run.tensorboard=false",
)  # fmt: skip


def called(*arguments: str) -> int:
    """Run the command of a file with one study; the exit code."""
    folder = Path("runs/small")
    on = ("data.root=hands", "data.split=val")
    hands = {"out": Path("hands"), "poses": 8, "seed": 0, "scenes": 2}
    scale = Scale(folder, ("data.root=hands",), ("data.root=hands",), on, hands=[hands])
    with patch("sys.argv", ["study", *arguments]), pytest.raises(SystemExit) as leaving:
        study.main({"small": {two_arms: scale}})
    return int(leaving.value.code or 0)


def test_a_study_runs_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(equivariance_maps, "ANGLES_DEG", np.linspace(-80, 80, 2))
    monkeypatch.setattr(equivariance_maps, "SHIFTS_PX", np.linspace(-25, 25, 2))
    arguments = ["--seeds", "0,1", "--record", "rows.jsonl", *as_options(TINY)]
    with narrow_resnet18(), patch("peclr_dali.train.trainer.save_views"):
        assert called(*arguments) == 0
        text, recorded = capsys.readouterr().out, Path("rows.jsonl").read_text()
        with patch.object(study, "load_pose_run", side_effect=AssertionError("it is measured already")):
            assert called(*arguments) == 0
    assert capsys.readouterr().out == text
    assert Path("rows.jsonl").read_text() == recorded
    rows = [json.loads(line) for line in recorded.splitlines()]
    assert [row["differences"] for row in rows if row["kind"] == "comparison"] != []
    assert np.isfinite([row["epe_px"] for row in rows if row["kind"] == "arm"]).all()
    errors = {(row["arm"], row["seed"]): row["epe_px"] for row in rows if row["kind"] == "arm"}
    assert len(set(errors.values())) == 6
    assert "rotated, px of 128" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "our"], "there is no arm 'our'; expected one of ours, elsewhere, scratch"),
        (["--set", "optim.clip=true"], "unknown key optim.clip"),  # not of the second kind of run
        (["--seeds", "1,x"], "'x' is not a valid integer"),
    ],
)
def test_a_mistake_ends_the_command_before_any_work(
    arguments: list[str],
    message: str,
    configs: Configs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert called(*arguments) == 2
    assert message in capsys.readouterr().err
    assert configs == {}

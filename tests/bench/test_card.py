"""The study of the paper's settings: its toy scale runs all the way, and its pre-trainings are the shipped ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from peclr_dali.bench.studies.card import card
from peclr_dali.bench.studies.run import run_study
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config


def test_the_toy_runs_all_the_way(tmp_path: Path) -> None:
    study = card("small", "card", ("010",), (0,)).only(["scratch_010", "peclr_010"])
    data = replace(study.at.data, root=str(tmp_path / "hands"), render={"poses": 20, "seed": 0, "scenes": 4})
    at = replace(study.at, data=data, pretrain=(*study.at.pretrain, "train.batch=32"))
    rows = list(run_study(replace(study, at=at, folder=tmp_path / "runs")))
    errors = {row["arm"]: row["epe_px"] for row in rows if row["kind"] == "arm"}
    assert errors.keys() == {"scratch_010", "peclr_010"}
    assert len(set(errors.values())) == 2
    assert np.isfinite([*errors.values()]).all()
    (pretrained,) = (row for row in rows if row["kind"] == "pretrain")
    assert pretrained["probe_step"][-1] == 4  # two epochs of two steps of 32 among 72 images


def test_pre_training_is_as_shipped() -> None:
    """But for data, weights at the start, and how often something is saved and probed."""
    study, overlay = card("paper", "card", ("010",), (0,)), Path("configs/cards/h100.toml")
    for arm in ("peclr", "simclr"):
        shipped = load_config(Config, [Path(f"configs/{arm}_rn50.toml"), overlay], ["encoder.weights=random"])
        made = study.pretraining(arm, 0).config
        assert replace(made, run=shipped.run, data=shipped.data, probe=shipped.probe) == shipped

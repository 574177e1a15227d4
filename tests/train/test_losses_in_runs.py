"""Runs with other losses than NT-Xent: of the product on two ranks, and one that a program brings along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch.nn import functional as F

from peclr_dali.bounds import Positive
from peclr_dali.errors import UserError
from peclr_dali.models.losses import LOSSES
from peclr_dali.models.losses.loss import Loss
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.report.charts import pretraining_charts
from peclr_dali.train.report.contents import read_runs
from tests.train import ranks, tiny_hands, tiny_run
from tests.train.narrow import narrow_resnet18

if TYPE_CHECKING:
    from torch import Tensor


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "images"
    tiny_run.write_images(root, count=24)
    return root


def test_vicreg_trains_on_one_rank_as_on_two(images: Path, tmp_path: Path) -> None:
    settings = ["loss.name=vicreg", "loss.covariance=2", "train.epochs=2", "train.precision=fp64", "run.log_every=1"]
    outs = {count: tmp_path / f"ranks-{count}" for count in (1, 2)}
    for count, out in outs.items():
        command = tiny_run.settings(images, out, *settings)
        log = out.with_suffix(".log")
        ranks.finish(ranks.start_ranks(count, ranks.pretrain, command, log=log), log)
    single, both = tiny_run.rows_of(outs[1]), tiny_run.rows_of(outs[2])
    assert [row["step"] for row in single] == [1, 2, 3, 4]
    for one, two in zip(single, both, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-8)
        weighted = 25 * one["invariance"] + 25 * one["variance"] + 2 * one["covariance"]
        assert one["loss"] == pytest.approx(weighted, rel=1e-10)
    assert (outs[2] / "loss.png").stat().st_size > 0
    (section,) = pretraining_charts(read_runs(list(outs.values())))
    assert section.pictures[0].alt == "VICReg loss"


def test_weighted_nt_xent_trains_on_pairs_on_one_rank_as_on_three(tmp_path: Path) -> None:
    tiny_hands.write_hands(tmp_path / "hands", poses=6)
    settings = ["data.source=freihand", "data.positive=version", "loss.name=weighted_nt_xent", "train.precision=fp64",
                "train.epochs=1", "run.log_every=1"]  # fmt: skip
    rows = {}
    for count in (1, 3):
        command = tiny_run.settings(tmp_path / "hands", tmp_path / f"ranks-{count}", *settings)
        log = tmp_path / f"{count}.log"
        ranks.finish(ranks.start_ranks(count, ranks.pretrain, command, log=log), log)
        rows[count] = tiny_run.rows_of(tmp_path / f"ranks-{count}")
    assert [row["step"] for row in rows[1]] == [1, 2]
    for one, three in zip(rows[1], rows[3], strict=True):
        assert three["loss"] == pytest.approx(one["loss"], rel=1e-8)


@pytest.mark.parametrize(("source", "lacking"), [("folder", "24 of 24"), ("freihand", "1 of 24")])
def test_a_loss_that_needs_keypoints_refuses_data_without_them(
    source: str, lacking: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "freihand":
        images = tmp_path / "hands"
        tiny_hands.write_hands(images, poses=6)
    settings = [f"data.source={source}", "loss.name=weighted_nt_xent"]
    config = tiny_run.config_of(images, tmp_path / "run", *settings)
    index = load_index(config.data)
    if index.keypoints_px is not None:
        index.keypoints_px[3, 20, 1] = np.nan
    monkeypatch.setattr("peclr_dali.train.trainer.load_index", lambda _: index)
    first = index.path(0 if source == "folder" else 3)
    with narrow_resnet18(), pytest.raises(UserError, match=f"{lacking} images, such as {first}, lack keypoints"):
        pretrain(config)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Distance(Loss):
    """Of the two views, with a power."""

    name: Literal["distance"] = "distance"
    power: Positive = 1.5

    def __call__(self, embeddings: Tensor) -> Tensor:
        first, second = F.normalize(embeddings, dim=2)
        distance: Tensor = (first - second).norm(dim=1)
        return distance.pow(self.power).mean()


def test_a_loss_of_ones_own_trains(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run.settings(images, tmp_path / "run", "loss.name=distance", "loss.power=2", "train.epochs=2")
    with pytest.raises(
        UserError, match=r"loss\.name = 'distance': input should be 'nt_xent' or 'weighted_nt_xent' or 'vicreg'"
    ):
        load_config(Config, [], settings)
    monkeypatch.setitem(LOSSES, "distance", Distance)
    config = load_config(Config, [], settings)
    assert config.loss == Distance(power=2)
    with pytest.raises(UserError, match=r"unknown key loss\.temperature"):
        load_config(Config, [], [*settings, "loss.temperature=0.1"])
    with narrow_resnet18():
        folder = pretrain(config)
        rows = folder.read_metrics()
        assert [row["step"] for row in rows] == [2, 4]
        for row in rows:
            assert row["loss"] == pytest.approx(row["alignment"], rel=1e-5)
        assert load_config(Config, [folder.config_file], []) == config
        pretrain(config, "auto")  # has finished
        with pytest.raises(UserError, match=r"loss\.power: was 2\.0, is now 1\.5"):
            pretrain(dataclasses.replace(config, loss=Distance()), "auto")


def test_a_row_of_metrics_waits_twice(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the loss, which decides on every rank if the run goes on, and for all other figures together."""
    reads: list[str] = []

    def recorded(name: str) -> Callable[[Tensor], Any]:
        read = getattr(torch.Tensor, name)

        def record(tensor: Tensor) -> Any:
            if tensor.is_floating_point():
                reads.append(name)
            return read(tensor)

        return record

    for name in ("item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, recorded(name))
    settings = ["loss.name=vicreg", "train.epochs=1", "train.recompute=never", "run.log_every=1"]
    with narrow_resnet18():
        pretrain(tiny_run.config_of(images, tmp_path / "run", *settings))
    assert reads == ["item", "tolist"] * 2

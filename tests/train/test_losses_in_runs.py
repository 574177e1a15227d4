"""Runs with a loss that a program brings along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch.nn import functional as F

from peclr_dali.bounds import Positive
from peclr_dali.errors import UserError
from peclr_dali.models.losses import LOSSES
from peclr_dali.models.losses.loss import Loss
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain
from tests.train import tiny_run
from tests.train.narrow import narrow_resnet18

if TYPE_CHECKING:
    from torch import Tensor


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "images"
    tiny_run.write_images(root, count=24)
    return root


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
    with pytest.raises(UserError, match=r"loss\.name = 'distance': input should be 'nt_xent'"):
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
    settings = ["train.epochs=1", "train.recompute=never", "run.log_every=1"]
    with narrow_resnet18():
        pretrain(tiny_run.config_of(images, tmp_path / "run", *settings))
    assert reads == ["item", "tolist"] * 2

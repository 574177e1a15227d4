"""Runs with a loss that a program brings along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peclr_dali.errors import UserError
from peclr_dali.models.nt_xent import NTXent
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import has_recorded_settings, pretrain
from tests.train import tiny_run
from tests.train.narrow import narrow_resnet18

if TYPE_CHECKING:
    from torch import Tensor


def distance(embeddings: Tensor) -> Tensor:
    """Mean squared distance of the two views on the unit sphere."""
    first, second = F.normalize(embeddings, dim=2)
    squared: Tensor = (first - second).square().sum(dim=1)
    return squared.mean()


def test_a_loss_of_ones_own_trains(images: Path, tmp_path: Path) -> None:
    config = load_config(Config, [], tiny_run.settings(images, tmp_path / "run", "train.epochs=1"))
    with narrow_resnet18():
        folder = pretrain(config, loss=distance)
        rows = folder.read_metrics()
        assert [row["step"] for row in rows] == [2, 4]
        for row in rows:
            assert row["loss"] == pytest.approx(row["alignment"], rel=1e-5)
        pretrain(config, "auto", loss=distance)  # has finished
        with pytest.raises(UserError, match=r"loss\.name: was 'distance', is now 'nt_xent'"):
            pretrain(config, "auto")
        with pytest.raises(UserError, match=r"loss\.name = 'distance': expected 'nt_xent'"):
            pretrain(load_config(Config, [folder.config_file], []), "auto")
        other = load_config(Config, [], tiny_run.settings(images, tmp_path / "other", "train.epochs=1"))
        pretrain(other, loss=NTXent(temperature=0.5))
        with pytest.raises(UserError, match=r"was 'NTXent\(temperature=0.5\)', is now 'NTXent\(temperature=5.0\)'"):
            pretrain(other, "auto", loss=NTXent(temperature=5.0))


def test_a_loss_whose_settings_are_not_recorded_is_told_once(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = 0.5
    settings = tiny_run.settings(images, tmp_path / "run", "train.epochs=1")

    def scaled(embeddings: Tensor) -> Tensor:
        return distance(embeddings) * weight

    losses: list[Any] = [scaled, nn.Identity(), object(), NTXent().share, distance, NTXent()]
    assert [has_recorded_settings(loss) for loss in losses] == [False] * 4 + [True] * 2
    with narrow_resnet18():
        pretrain(load_config(Config, [], settings), loss=scaled)
    told = [message for message in caplog.messages if "settings of the loss <function" in message]
    assert len(told) == 1


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
    assert reads == ["item", "tolist"] * 4

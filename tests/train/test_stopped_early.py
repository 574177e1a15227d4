"""Runs of both trainings that are stopped before there is anything to tell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.distributed.interrupt import Interrupted, StopSignals
from peclr_dali.train.finetune import Finetuning, finetune
from peclr_dali.train.pretrain import Pretraining, pretrain
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.steps.training_state import Result, TrainingState
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")


def pretraining(tmp_path: Path) -> RunFolder:
    """A run of pre-training, where the steps allow it."""
    tiny_run.write_images(tmp_path / "images", 12)
    return pretrain(tiny_run.config_of(tmp_path / "images", tmp_path / "run"))


def finetuning(tmp_path: Path) -> RunFolder:
    """A run of fine-tuning, where the steps allow it."""
    tiny_hands.write_hands(tmp_path / "hands", 12)
    return finetune(tiny_hands.config_of(tmp_path / "hands", tmp_path / "run"))


@pytest.mark.parametrize(
    ("run", "state", "by"),
    [(pretraining, Pretraining, signal.SIGHUP), (finetuning, Finetuning, signal.SIGTERM)],
)
def test_a_run_that_is_stopped_before_its_first_row_of_metrics_is_saved(
    run: Callable[[Path], RunFolder],
    state: type[TrainingState[Any, Any]],
    by: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing to draw then."""
    step = state.step

    def stopped(self: TrainingState[Any, Any], batch: Batch) -> Result:
        os.kill(os.getpid(), by)
        result: Result = step(self, batch)
        return result

    monkeypatch.setattr(state, "step", stopped)
    before = signal.signal(by, signal.SIG_DFL)  # tests may run under nohup
    try:
        with pytest.raises(Interrupted):
            run(tmp_path)
    finally:
        signal.signal(by, before)
    folder = RunFolder(tmp_path / "run", keep=3)
    assert folder.read_metrics() == []
    assert [path.name for path in folder.checkpoints.paths()] == ["step_000000001.pt"]
    assert not folder.loss_picture.exists()


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

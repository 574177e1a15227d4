"""How runs of both trainings end: stopped before there is anything to tell, without their folder, and freed."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.train.distributed.interrupt import Interrupted, StopSignals
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.steps.train_state import TrainState
from tests.command_line import as_options, run_cli
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")


@pytest.mark.parametrize(("run", "by"), [(pretrain, signal.SIGHUP), (finetune, signal.SIGUSR1)])
def test_a_run_that_is_stopped_before_its_first_row_of_metrics_is_saved(
    run: Callable[[Any], RunFolder],
    by: signal.Signals,
    images: Path,
    hands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing to draw then."""
    tiny, data = (tiny_run, images) if run is pretrain else (tiny_hands, hands)
    at_step(0, lambda: os.kill(os.getpid(), by), monkeypatch)
    before = signal.signal(by, signal.SIG_DFL)  # tests may run under nohup
    try:
        with pytest.raises(Interrupted):
            run(tiny.config_of(data, tmp_path / "run"))
    finally:
        signal.signal(by, before)
    folder = RunFolder(tmp_path / "run", keep=3)
    assert folder.read_metrics() == []
    assert [path.name for path in folder.checkpoints.paths()] == ["step_000000001.pt"]
    assert not folder.loss_picture.exists()


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(alone=True):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def at_step(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act during a step."""
    update = TrainState.update

    def updated(self: TrainState) -> None:
        if self.steps_done == number:
            act()
        update(self)

    monkeypatch.setattr(TrainState, "update", updated)


def test_a_run_whose_images_disappear_is_saved_and_goes_on_when_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's disk. It becomes what an undisturbed run becomes."""
    tiny_run.write_images(tmp_path / "images")
    rare = ("run.log_every=100", "run.checkpoint_every=100", "pipelines.batch=12", "pipelines.ahead=1")
    wanted = pretrain(tiny_run.config_of(tmp_path / "images", tmp_path / "undisturbed", *rare))
    config = tiny_run.config_of(tmp_path / "images", tmp_path / "run", *rare)
    with monkeypatch.context() as patch:
        at_step(3, lambda: (tmp_path / "images").rename(tmp_path / "away"), patch)
        with pytest.raises(UserError, match="64 images drawn in a row cannot be used"):
            pretrain(config)
    (saved,) = RunFolder(tmp_path / "run", keep=3).checkpoints.paths()
    assert 3 < int(saved.stem.removeprefix("step_")) < tiny_run.STEPS
    (tmp_path / "away").rename(tmp_path / "images")
    pretrain(config, "auto")
    ours, theirs = (tiny_run.final_weights(folder) for folder in (tmp_path / "run", wanted.root))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("logging_set_back")
def test_a_run_without_its_folder_ends_with_one_line(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_step(5, lambda: shutil.rmtree(tmp_path / "run"), monkeypatch)
    settings = tiny_run.settings(images, tmp_path / "run", "run.checkpoint_every=100")
    capsys.readouterr()
    assert run_cli("pretrain", *as_options(settings)) == 1
    assert f"error: run.out = {tmp_path / 'run'} was removed" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("full", [pytest.param(True, marks=pytest.mark.slow), False])
def test_lines_that_nobody_can_read_end_no_run(images: Path, tmp_path: Path, *, full: bool) -> None:
    """Behind stderr is a full disk, or a pipe whose reader has ended, such as `head` or an ssh that is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") if full else os.fdopen(writer, "w") as stderr:
        done = subprocess.run(
            [sys.executable, tiny_run.CLI, "pretrain",
             *as_options(tiny_run.settings(images, tmp_path / "run", "train.epochs=1"))],
            cwd=tiny_run.ROOT, env={**os.environ, "PYTHONPATH": str(tiny_run.ROOT)}, stderr=stderr, check=False,
        )  # fmt: skip
    assert len(tiny_run.rows_of(tmp_path / "run")) == 2
    assert tiny_run.final_weights(tmp_path / "run", 4)
    assert done.returncode == 0


def in_memory() -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), TrainState)]


@pytest.mark.parametrize("run", [pretrain, finetune])
def test_a_run_is_freed(run: Callable[[Any], RunFolder], images: Path, hands: Path, tmp_path: Path) -> None:
    tiny, data = (tiny_run, images) if run is pretrain else (tiny_hands, hands)
    config = tiny.config_of(data, tmp_path / "run", "train.epochs=1")
    gc.collect()
    before, frozen = len(in_memory()), gc.get_freeze_count()
    gc.disable()  # the network goes with the last reference to it, not at some later collection
    try:
        run(config)
        assert len(in_memory()) == before
    finally:
        gc.enable()
    assert gc.get_freeze_count() <= frozen  # what earlier tests froze is free again

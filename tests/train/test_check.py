"""`pretrain --check` and `finetune --check`: as far as the first step, without a trace."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from peclr_dali.train.steps.exact import ExactStep
from tests.command_line import as_options, run_cli
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow", "logging_set_back")


def test_a_check_takes_the_next_step_and_writes_nothing(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["pretrain", *as_options(tiny_run.settings(images, out, "train.epochs=1", "run.log_every=1"))]
    assert run_cli(*words, "--check") == 0
    assert not out.exists()
    assert run_cli(*words) == 0
    first, *_, last = tiny_run.rows_of(out)
    assert f"ready: loss {first['loss']:.3f} in step 1; nothing is saved\n" in capsys.readouterr().err

    (out / "checkpoints" / "step_000000004.pt").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_cli(*words, "--resume", "auto", "--check") == 0
    assert f"ready: loss {last['loss']:.3f} in step 4;" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_a_check_of_fine_tuning_writes_nothing(hands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("finetune", *as_options(tiny_hands.settings(hands, tmp_path / "run")), "--check") == 0
    assert "ready: loss " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Mock(side_effect=torch.OutOfMemoryError("No memory.")), "more memory: No memory. Lower train.micro_batch"),
        (Mock(return_value=Mock(loss=torch.tensor(torch.nan))), "the loss is nan at step 1"),
    ],
)
def test_a_first_step_that_fails_is_a_mistake(
    step: Mock, line: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(ExactStep, "__call__", step)
    assert run_cli("pretrain", *as_options(tiny_run.settings(images, tmp_path / "run")), "--check") == 2
    assert line in capsys.readouterr().err

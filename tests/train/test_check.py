"""`pretrain --check` and `finetune --check`: as far as the first step, without a trace."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.steps.exact import ExactStep, StepResult
from tests.command_line import as_options, refusal, run_cli
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow", "logging_set_back")


def content(folder: Path) -> dict[Path, bytes]:
    """What is in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_check_takes_the_next_step_and_writes_nothing(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["pretrain", *as_options(tiny_run.settings(images, out, "train.epochs=1", "run.log_every=1"))]
    assert run_cli(*words, "--check") == 0
    assert not out.exists()
    checked = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ready: ")]

    assert run_cli(*words) == 0
    first, *_, last = tiny_run.rows_of(out)
    assert checked == [f"ready: loss {first['loss']:.3f} in step 1; nothing is saved"]

    (out / "checkpoints" / "step_000000004.pt").unlink()
    before, _ = content(out), capsys.readouterr()
    assert run_cli(*words, "--resume", "auto", "--check") == 0
    assert f"ready: loss {last['loss']:.3f} in step 4;" in capsys.readouterr().err
    assert content(out) == before
    assert "holds a run already" in refusal(capsys, *words, "--check")


def test_a_check_of_fine_tuning_writes_nothing(hands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", *as_options(tiny_hands.settings(hands, tmp_path / "run")), "--check"]
    assert run_cli(*words) == 0
    assert "ready: loss " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "memory. Lower train.micro_batch"),
        (None, "the loss is nan at step 1"),
    ],
)
def test_a_first_step_that_fails_is_a_mistake(
    found: Exception | None, line: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ["pretrain", *as_options(tiny_run.settings(images, tmp_path / "run")), "--check"]
    step = ExactStep.__call__

    def failing(self: ExactStep[Batch], batch: Batch) -> StepResult:
        if found is not None:
            raise found
        return replace(step(self, batch), loss=torch.tensor(torch.nan))

    monkeypatch.setattr(ExactStep, "__call__", failing)
    capsys.readouterr()
    assert run_cli(*words) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]

"""One run at a time writes into a folder: two starts by mistake, a launcher that was killed, a start that failed."""

import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from peclr_dali.train.runs.folder import RunFolder, read_rows
from tests.command_line import as_options, run_cli
from tests.train import ranks, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")

PATIENCE_S = 120.0
"""Far more than anything here needs, however busy the machine is."""


def pretrain(images: Path, out: Path, *overrides: str, resume: str = "never") -> list[str]:
    settings = tiny_run.settings(images, out, "run.checkpoint_every=1", "run.log_every=1", *overrides)
    return ["pretrain", "--resume", resume, *as_options(settings)]


def steps_of(out: Path) -> list[float]:
    return [row["step"] for row in tiny_run.rows_of(out)]


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("resume", ["never", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_second_start_is_one_line_and_touches_nothing(resume: str, images: Path, tmp_path: Path) -> None:
    out, logs = tmp_path / "run", (tmp_path / "first.log", tmp_path / "second.log")
    (first,) = ranks.start_ranks(1, ranks.command, pretrain(images, out, "train.epochs=100000"), log=logs[0])
    try:
        wait_for(lambda: len(steps_of(out)) > 2)
        again = pretrain(images, out, "train.epochs=100000", resume=resume)
        output = ranks.run_ranks(1, ranks.command, again, log=logs[1], code=2)
        assert first.is_alive()
    finally:
        first.terminate()
        ranks.finish([first], logs[0], code=128 + signal.SIGTERM)
    (line,) = output.splitlines()
    assert line.startswith(f"error: run.out = {out} is in use by process {first.pid} on {platform.node()} since 20")
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_ranks_whose_launcher_was_killed_save_and_leave(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = pretrain(images, out, "train.epochs=100000", resume="auto")
    logs = (tmp_path / "torchrun.log", tmp_path / "again.log")
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", tiny_run.CLI, *arguments]
    (launcher,) = ranks.start_ranks(1, ranks.torchrun, words, log=logs[0])
    try:
        wait_for(lambda: len(steps_of(out)) > 2)
        started = [child for child in psutil.Process(launcher.pid).children() if tiny_run.CLI in child.cmdline()]
        assert len(started) == 2
    finally:
        ranks.kill([launcher])
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    for rank in alive:
        rank.kill()
    output = logs[0].read_text()
    assert alive == [], output
    assert "stopped by SIGTERM after step" in output
    done = len(steps_of(out))
    assert steps_of(out) == list(range(1, done + 1))

    (again,) = ranks.start_ranks(1, ranks.command, arguments, log=logs[1])
    try:
        wait_for(lambda: len(steps_of(out)) > done)
    finally:
        again.terminate()
        said = ranks.finish([again], logs[1], code=128 + signal.SIGTERM)
    assert "resuming after step" in said
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_a_run_without_a_checkpoint_is_started_again(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run_cli(*pretrain(images, out, "optim.lr=1e18", "train.epochs=1", "run.checkpoint_every=100")) == 2
    assert "the last good checkpoint is none" in capsys.readouterr().err
    assert (out / "config.toml").exists()
    for resume in ("never", "auto"):  # the second finds what the first saved
        assert run_cli(*pretrain(images, out, "train.epochs=1", resume=resume)) == 0
        said = capsys.readouterr().err
        assert (f"{out} holds a run without a checkpoint: starting anew" in said) == (resume == "never")
    assert steps_of(out) == [1, 2, 3, 4]
    assert "lr = 0.001" in (out / "config.toml").read_text()
    assert run_cli(*pretrain(images, out, "train.epochs=1")) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_what_a_kill_leaves_is_cleaned_up(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_cli(*pretrain(images, out, "train.epochs=1")) == 0
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')
    (out / "checkpoints" / "step_000000004.pt").unlink()
    (out / "loss.png.4242-1f.part").write_text("of a process that was killed")
    assert run_cli(*pretrain(images, out, "train.epochs=1", "loss.temperature=0.1", resume="auto")) == 2
    assert "loss.temperature: was 0.5, is now 0.1" in capsys.readouterr().err
    assert run_cli(*pretrain(images, out, "train.epochs=1", resume="auto")) == 0
    assert steps_of(out) == [1, 2, 3, 4]
    assert not list(out.glob("*.part"))


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "a" / "b", keep=1).lock():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\n\0\0\0\n[1]\n{}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in read_rows(file)] == [1, 2]

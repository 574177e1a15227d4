"""Bad input under torchrun: reported once, before the ranks meet, and not tried again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cli
from errors import Outage, RanksLost, ReportedByAnotherRank, UserError
from errors.refused import machine_error_line
from tests.command_line import run_cli
from tests.train.ranks import free_port
from train.commands import training

ROOT = Path(__file__).parents[3]


def launch(*arguments: str, restarts: int) -> list[str]:
    """What the ranks that torchrun starts print."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}",
                f"--master-port={free_port()}"]  # fmt: skip
    done = subprocess.run(
        [*torchrun, "cli.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("failed (exitcode: 2)") == restarts + 1, done.stderr  # torchrun's line for each attempt
    return [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "data.root={here}/no"], "error: {here}/no: does not exist; expected the folder of the images"),
        (
            ["--set", "data.source=folder", "--set", "data.root={here}/empty"],
            "error: {here}/empty: no .jpg",
        ),  # found later
        (["--speed=high"], "error: No such option '--speed'"),
    ],
    ids=["no folder", "no images", "no such option"],
)
def test_torchrun_reports_bad_input_once(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    filled = [argument.replace("{here}", str(tmp_path)) for argument in arguments]
    steps = ["--set", "train.batch=8", "--set", "train.micro_batch=4", "--set", "train.device=cpu"]
    (line,) = launch("pretrain", "--out", str(tmp_path / "out"), *steps, *filled, restarts=1)
    assert expected.replace("{here}", str(tmp_path)) in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launch of torchrun's, as its workers see it."""
    error_file = tmp_path / "launch" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    return tmp_path / "launch"


def caused_by(cause: OSError) -> UserError:
    error = UserError("cannot be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (UserError("a wrong key"), True),
        (RanksLost("rank 2"), False),
        (Outage("s3://images: 11 attempts failed"), False),
        (OSError(errno.ENOENT, "No such file or directory", "/a"), True),
        (OSError(errno.EIO, "Input/output error", "/a"), False),
        (MemoryError(), True),
        (caused_by(OSError(errno.EACCES, "Permission denied")), True),
        (caused_by(OSError(errno.ENOSPC, "No space left on device")), False),
        (caused_by(OSError("not a regular file")), True),
    ],
    ids=repr,
)
def test_a_restart_follows_where_it_may_help(
    error: Exception, refused: bool, attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(training, "_resolve", fail)
    assert run_cli("pretrain") == 2
    assert capsys.readouterr().err == f"error: {machine_error_line(error) or error}\n"
    assert (attempt / "bad_input").exists() == refused
    assert run_cli("pretrain") == 2
    assert (capsys.readouterr().err == "") == refused


@pytest.mark.parametrize("transient", [False, True])
def test_a_rank_leaves_after_another_has_reported(
    transient: bool, attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ReportedByAnotherRank("rank 1: no room", transient=transient)

    slept: list[float] = []
    monkeypatch.setattr(training, "_resolve", fail)
    monkeypatch.setattr("cli.time.sleep", slept.append)
    assert run_cli("pretrain") == 2
    assert capsys.readouterr().err == ""
    assert slept == [5.0], "torchrun ends this rank after the other one has reported"
    assert (attempt / "bad_input").exists() != transient
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "attempt_1" / "0" / "error.json"))
    assert run_cli("pretrain") == 2
    assert (len(slept) == 2) == transient, "without waiting, if the input is bad"


def test_the_first_rank_of_a_host_reports_a_mistake(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_REPORT_S", 0.0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for words in (["--set", "optim.rate=1"], ["--speed=high"], ["--set", "data.root=/nowhere"]):
        (attempt / "bad_input").unlink(missing_ok=True)
        assert run_cli("pretrain", *words) == 2
        assert capsys.readouterr().err == ""

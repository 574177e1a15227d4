"""One run at a time writes into a folder, and what a kill leaves behind locks nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peclr_dali.errors import Outage, UserError
from peclr_dali.train.runs.lock import LOCK, locked, require_free

ROOT = Path(__file__).parents[3]
HOLD = """
import pathlib, sys, time
from peclr_dali.train.runs.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_learns_who_holds_the_lock_and_a_kill_releases_it(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        try:
            words = rf"run.out = {tmp_path}/run is in use by process {process.pid} on {platform.node()} since 20\d\d-"
            with pytest.raises(Outage, match=words), locked(tmp_path / "run"):
                pytest.fail("two have it")
            with pytest.raises(Outage, match=words):  # torchrun tries again: it may be a rank of the last attempt
                require_free(tmp_path / "run")
        finally:
            process.send_signal(signal.SIGKILL)
    assert f'"pid": {process.pid}' in (tmp_path / "run" / LOCK).read_text()  # stale
    require_free(tmp_path / "run")
    require_free(tmp_path / "absent")
    with locked(tmp_path / "run"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "run" / LOCK).read_text()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_pipe_in_place_of_the_lock_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    require_free(tmp_path)
    with pytest.raises(UserError, match="cannot be written to: Invalid argument"), locked(tmp_path):
        pytest.fail("a pipe was locked")


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_file_that_its_holder_removes_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).write_text("of a third process")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(Outage, match="in use by another process"), locked(tmp_path):
        pytest.fail("taken")
    assert (tmp_path / LOCK).read_text() == "of a third process"


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()
    (message,) = caplog.messages
    assert message.startswith(f"the file system of {tmp_path} has no locks")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_user_without_write_permission_needs_no_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with locked(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"new cannot be written to: No space left"), locked(tmp_path / "new"):
        pytest.fail("taken")
    assert list(tmp_path.iterdir()) == []

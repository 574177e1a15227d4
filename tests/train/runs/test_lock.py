"""One run at a time writes into a folder, and what a kill leaves behind locks nothing."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peclr_dali.errors import UserError
from peclr_dali.train.runs.lock import LOCK, locked

ROOT = Path(__file__).parents[3]
HOLD = """
import pathlib, sys, time
from peclr_dali.train.runs.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_learns_who_holds_the_lock_and_a_kill_releases_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            words = rf"run.out = {folder} is in use by process {holder.pid} on {platform.node()} since 20\d\d-"
            with pytest.raises(UserError, match=words), locked(folder):
                pytest.fail("two have it")
        finally:
            holder.send_signal(signal.SIGKILL)
    assert f"process {holder.pid}" in (folder / LOCK).read_text()  # stale
    with locked(folder):
        assert f"process {os.getpid()}" in (folder / LOCK).read_text()
    assert list(folder.iterdir()) == []


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="file/run cannot be written to: Not a directory"),
        locked(tmp_path / "file/run"),
    ):
        pytest.fail("held")

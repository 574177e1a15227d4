"""One run at a time writes into a folder, what a kill leaves behind locks nothing, and its rows are whole."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peclr_dali.errors import UserError
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.folder import LOCK, RunFolder, read_rows

ROOT = Path(__file__).parents[3]
HOLD = """
import pathlib, sys, time
from peclr_dali.train.runs.folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1]), keep=1).lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_learns_who_holds_the_lock_and_a_kill_releases_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", keep=1)
    command = [sys.executable, "-c", HOLD, str(folder.root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            words = rf"run.out = {folder.root} is in use by process {holder.pid} on {platform.node()} since 20\d\d-"
            with pytest.raises(UserError, match=words), folder.lock():
                pytest.fail("two have it")
        finally:
            holder.send_signal(signal.SIGKILL)
    assert f"process {holder.pid}" in (folder.root / LOCK).read_text()  # stale
    with folder.lock():
        assert f"process {os.getpid()}" in (folder.root / LOCK).read_text()
        (folder.root / "file").write_text("")
    assert [path.name for path in folder.root.iterdir()] == ["file"]


def test_a_word_for_resume_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume = 'always': expected one of never, auto"):
        RunFolder(tmp_path, keep=1).check(Config(), "always")  # type: ignore[arg-type]


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "a" / "b", keep=1).lock():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_rows_of_steps_that_are_repeated_and_a_half_written_one_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep=1)
    assert folder.read_metrics() == []
    rows = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    folder.metrics_file.write_text(
        '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n{"step": 3, "loss": 0.3333333333333333}\n{"step": 4, "lo'
    )
    assert folder.read_metrics() == rows
    folder.claim(Config(), 2)
    assert folder.metrics_file.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n'


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\n\0\0\0\n[1]\n{}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in read_rows(file)] == [1, 2]

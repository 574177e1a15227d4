"""One run at a time writes into a folder, what a kill leaves behind locks nothing, and its rows are whole."""

import os
import platform
from pathlib import Path

import pytest

from peclr_dali.errors import UserError
from peclr_dali.train.runs.folder import LOCK, RunFolder, read_rows


def test_a_second_start_learns_who_holds_the_lock_and_what_a_kill_left_locks_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", keep=1)
    folder.root.mkdir()
    (folder.root / LOCK).write_text("process 1 on a host that was switched off\n")
    with folder.lock():
        words = rf"run.out = {folder.root} is in use by process {os.getpid()} on {platform.node()} since 20\d\d-"
        with pytest.raises(UserError, match=words), folder.lock():
            pytest.fail("two have it")
        (folder.root / "file").write_text("")
    assert [path.name for path in folder.root.iterdir()] == ["file"]


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "a" / "b", keep=1).lock():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\n\0\0\0\n[1]\n{}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in read_rows(file)] == [1, 2]

"""Damaged rows of a run cost no other row, and end nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from peclr_dali.train.commands.training import _show_loss
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.json_lines import cut_rows, read_undamaged_rows

DAMAGED = [
    b"null", b"7", b'"step"', b"[1]", b"{}", b'{"step": null}', b'{"step": "3"}', b'{"step": true}', b'{"step": 1.5}',
    b'{"step": 3, "loss": "x"}', b'{"step": 3, "loss": null}', b'{"step": 3}', b"\xff\xfe", b'{"step": 3, "\xe4": 1}',
    b'{"step": 3, "loss"', b"[" * 100_000, b"\x00" * 50, b"", b'{"step": ' + b"9" * 5000 + b', "loss": 1}',
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda line: repr(line[:12]))
def test_a_damaged_row_is_left_out_and_counted(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2}\n' + damaged + b'\n{"step": 2, "loss": 1.5}\n')
    assert read_undamaged_rows(file, numbers=("loss",)) == [{"step": 1, "loss": 2}, {"step": 2, "loss": 1.5}]
    assert caplog.messages == [f"{file}: 1 row is damaged and left out, the first in line 2"]
    cut_rows(file, 1)
    assert file.read_bytes() == b'{"step": 1, "loss": 2}\n'


def test_an_incomplete_last_row_is_left_out_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_undamaged_rows(file) == [{"step": 1}]
    cut_rows(file, 9)
    assert file.read_bytes() == b'{"step": 1}\n'
    assert caplog.messages == []


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_undamaged_rows(tmp_path / "no.jsonl") == []
    cut_rows(tmp_path / "no.jsonl", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "lo'])
def test_a_finished_run_without_rows_has_no_loss_to_show(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, keep=1)
    if content is not None:
        folder.metrics_file.write_text(content)
    _show_loss(folder)
    assert f"loss: not in {folder.metrics_file}, which has no undamaged row" in capsys.readouterr().out

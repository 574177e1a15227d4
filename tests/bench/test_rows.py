"""Files of rows: a row is appended whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peclr_dali.bench import rows
from tests.command_line import run_cli
from tests.full_disk import files_of_at_most


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda number: rows.append(file, {"figure": number}), range(40)))
    assert sorted(row["figure"] for row in rows.read_rows(file)) == list(range(40))


@pytest.mark.parametrize("text", ['{"figure": 1}', '{"figure": 1}\n{"fig', "[1]\n", '{"fig\n', "[" * 100_000 + "\n"])
def test_a_damaged_file_is_refused_before_anything_is_measured(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    monkeypatch.setattr("peclr_dali.bench.measure.require_images", lambda *_: pytest.fail("begins to measure"))
    for command in ("bench-loader", "bench-train"):
        assert run_cli(command, "--record", str(file)) == 2
        error = capsys.readouterr().err
        assert f"--record {file}: holds no rows" in error
        assert error.count("\n") == 1
    assert file.read_text() == text


def test_a_full_disk_leaves_the_row_in_the_error(tmp_path: Path) -> None:
    row = {"figure": "x" * 10_000}
    with files_of_at_most(4096), pytest.raises(OSError, match="large") as caught:
        rows.append(tmp_path / "rows.jsonl", row)
    assert row["figure"] in caught.value.__notes__[0]


def test_rows_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"name": "a\u2028b"}\r\n', encoding="utf-8")
    assert rows.read_rows(tmp_path / "rows.jsonl") == [{"name": "a\u2028b"}]

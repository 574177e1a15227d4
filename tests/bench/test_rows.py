"""Files of rows: a row is appended whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import click
import pytest

from peclr_dali.bench import rows
from peclr_dali.bench.options import output_options
from peclr_dali.errors import UserError
from tests.command_line import run_cli
from tests.full_disk import files_of_at_most


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda number: rows.append(file, {"figure": number}), range(40)))
    assert sorted(row["figure"] for row in rows.read_rows(file)) == list(range(40))
    assert [row["place"] for row in rows.rows_of(file)][-1] == "`rows.jsonl`, row 40"


def test_a_row_is_recorded_before_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @output_options
    def measure(tell: Callable[..., None]) -> None:
        tell({"figure": 1}, "a table")

    monkeypatch.setattr(rows, "show", Mock(side_effect=BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        measure.main(["--record", str(tmp_path / "rows.jsonl")], standalone_mode=False)
    assert rows.read_rows(tmp_path / "rows.jsonl") == [{"figure": 1}]


@pytest.mark.parametrize("text", ['{"figure": 1}', '{"figure": 1}\n{"fig'])
def test_a_torn_file_is_refused_at_the_start_and_later(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    monkeypatch.setattr(
        "peclr_dali.bench.loaders.compare.compare_loaders", lambda *arguments: pytest.fail("begins to measure")
    )
    for command in (["bench-loader"], ["bench-train"]):
        assert run_cli(*command, "--record", str(file)) == 2
        error = capsys.readouterr().err
        assert f"--record {file}: its last line has no newline" in error
        assert error.count("\n") == 1
    with pytest.raises(UserError, match=r'its last line has no newline.*\{"figure": 2\}'):
        rows.append(file, {"figure": 2})
    assert file.read_text() == text


def test_a_full_disk_leaves_no_part_of_a_row_and_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows.append(file, {"figure": 1})
    before = file.read_bytes()
    row = {"figure": "x" * 10_000}
    with (
        files_of_at_most(4096),
        pytest.raises(UserError, match=r"cannot be written \(File too large\): .* The row is: "),
    ):
        rows.append(file, row)
    assert file.read_bytes() == before
    rows.append(file, row)
    assert rows.read_rows(file)[1] == row


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "/proc"])
def test_what_is_no_file_of_rows_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"device": Path("/dev/full"), "/proc": Path("/proc/rows.jsonl")}
    place = places.get(kind, tmp_path / kind)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    assert run_cli("bench-loader", "--record", str(place)) == 2
    error = capsys.readouterr().err
    assert str(place) in error
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=r'\{"figure": 7\}'):
        rows.append(place, {"figure": 7})


@pytest.mark.parametrize(("row", "reason"), [('{"fig', "Unterminated string"), ("[" * 100_000, "nested too deeply")])
def test_a_damaged_row_is_refused_at_the_start(
    row: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"figure": 1}}\n{row}\n{{"figure": 3}}\n')
    assert run_cli("bench-train", "--record", str(file)) == 2
    assert f"--record {file}: holds no rows ({reason}" in capsys.readouterr().err


def test_rows_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"name": "a\u2028b"}\r\n', encoding="utf-8")
    assert rows.read_rows(tmp_path / "rows.jsonl") == [{"name": "a\u2028b"}]


def test_the_check_leaves_no_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text(json.dumps({"figure": 1}) + "\n")
    for file in (kept, tmp_path / "none.jsonl"):
        rows.require_appendable(file)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.jsonl"]
    assert rows.read_rows(kept) == [{"figure": 1}]

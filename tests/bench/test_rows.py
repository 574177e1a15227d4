"""Files of rows: a row is appended whole or not at all."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peclr_dali.bench import rows
from tests.command_line import refusal


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
    monkeypatch.setattr("peclr_dali.pipelines.sources.load_index", lambda *_: pytest.fail("begins to measure"))
    for command in ("bench-loader", "bench-train"):
        assert f"{file}: holds no rows" in refusal(capsys, command, "--record", str(file))
    assert file.read_text() == text

"""The table of docs/performance.md, which is that of the newest row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.bench import tables
from peclr_dali.bench.tables import PAGE, filled


def test_the_page_holds_what_the_rows_say() -> None:
    text = PAGE.read_text()
    assert filled(text) == text, "run 'python -m peclr_dali.bench.tables'"


def test_the_newest_row_of_small_sources_on_a_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(rate: float, gpu: str = "none", **more: str) -> dict[str, Any]:
        part = {"interval": [1, 2], "cpu_ms_per_image": 1, "cores_busy": 1.9, "ours_is": [1, 1, 1]}
        machine = {"cpu": "CPU", "gpu": gpu, "cores": 2, "date": "2030-01-01", "commit": "abc"}
        loaders = [{"name": name, "images_per_s": rate, **part} for name in ("this loader", "A")]
        return {"machine": machine, "loaders": loaders, "stages": [], **more}

    rows = [row(111), row(222), row(333, sources="large"), row(444, "Card")]
    monkeypatch.setattr(tables, "LOADERS", tmp_path / "loader.jsonl")
    tables.LOADERS.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    made = filled("before\n<!-- rows: loaders -->\nold\n<!-- end rows -->\nafter\n")
    head = "before\n<!-- rows: loaders -->\n\n`loader.jsonl`, row 2: 2 cores of an CPU, no GPU, 2030-01-01"
    assert made.startswith(head)
    assert "| this loader | 222 (1 to 2)    | 1.000        | 1.90       | 1.00 x (1.00 to 1.00) |\n| A " in made
    assert made.endswith("|\n\n<!-- end rows -->\nafter\n")

"""The tables of README.md and docs/performance.md, which are those of the newest rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.bench import tables
from peclr_dali.bench.tables import PAGES, TABLES, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_hold_what_the_rows_say(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run 'python -m peclr_dali.bench.tables'"


def test_the_newest_row_of_small_sources_on_a_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(rate: float, gpu: str = "none", **more: str) -> dict[str, Any]:
        part = {"interval": [1, 2], "cpu_ms_per_image": 1, "cores_busy": 1.9, "ours_is": [1, 1, 1]}
        machine = {"cpu": "CPU", "gpu": gpu, "cores": 2, "date": "2030-01-01", "commit": "abc"}
        loaders = [{"name": name, "images_per_s": rate, **part} for name in ("this loader", "A")]
        return {"machine": machine, "loaders": loaders, "stages": [], **more}

    rows = [row(111), row(222), row(333, sources="large"), row(444, "Card")]
    (tmp_path / "loader.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n<!-- rows: loaders{} -->\nold\n<!-- end rows -->\nafter\n"
    made = filled(page.format(""))
    head = "before\n<!-- rows: loaders -->\n\n`loader.jsonl`, row 2: 2 cores of an CPU, no GPU, 2030-01-01"
    assert made.startswith(head)
    assert "| this loader | 222 (1 to 2)    | 1.000        | 1.90       | 1.00 x (1.00 to 1.00) |\n| A " in made
    assert made.endswith("|\n\n<!-- end rows -->\nafter\n")
    assert "| A " not in filled(page.format("-in-short"))


def test_training_on_cards_is_a_table_of_their_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"cpu": "CPU", "gpu": "Card", "cores": 16, "date": "2030-01-01", "commit": "abc"}

    def row(rate: float, views: str = "gpu", card: str = "NVIDIA Card") -> dict[str, Any]:
        with_loader, in_memory = ({"images_per_s": one, "interval": [1, 9]} for one in (rate, 2 * rate))
        return {"machine": machine, "card": card, "files": ["peclr_rn50", "h100"], "decoder": "gpu",
                "views": views, "with_loader": with_loader, "in_memory": in_memory, "waited_share": 0.004,
                "cores_busy": 1.7, "computed_twice": "0 of 16", "peak_memory_mib": 900,
                "device_memory_mib": 1000}  # fmt: skip

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text(f"{json.dumps(row(9, card='none'))}\n")
    assert TABLES["gpu"]() == "No row of `bench-train` on a GPU yet."
    file.write_text("".join(f"{json.dumps(one)}\n" for one in (row(1), row(2, "dali"), row(3))))
    head, _, _, _, *lines = TABLES["gpu"]().splitlines()
    assert head.startswith("`train.jsonl`, row 3: 16 cores of an CPU, Card, 2030-01-01")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["Card", "peclr_rn50 h100", "gpu", views, f"{rate}.0 (1.0 to 9.0)", f"{2 * rate}.0 (1.0 to 9.0)",
         "0.4%", "1.7", "0 of 16", "900", "1000"]
        for rate, views in ((3, "gpu"), (2, "dali"))
    ]  # fmt: skip

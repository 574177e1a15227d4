"""The tables of README.md and docs/performance.md, which are those of the newest rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.bench import tables
from peclr_dali.bench.tables import PAGES, RESULTS, TABLES, filled

DOCS = sorted((RESULTS.parents[1] / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_hold_what_the_rows_say(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run 'python -m peclr_dali.bench.tables'"


def test_every_table_stands_on_a_page_that_is_filled() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- rows: {name} -->" not in text] == []
    assert [page.name for page in DOCS if page not in PAGES and "<!-- rows: " in page.read_text()] == []


def test_the_newest_row_of_these_sources_on_a_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(images_per_s: float, sources: str, gpu: str = "none") -> dict[str, Any]:
        part = {"interval": [1, 2], "cpu_ms_per_image": 1, "ours_is": [1, 1, 1]}
        machine = {"cpu": "CPU", "gpu": gpu, "cores": 2, "date": "2030-01-01", "commit": "abc"}
        rates = {"this loader": images_per_s, "A": 5}
        loaders = [{"name": name, "images_per_s": rate, **part} for name, rate in rates.items()]
        return {"machine": machine, "sources": sources, "loaders": loaders, "stages": []}

    rows = [row(111, "small"), row(222, "small"), row(333, "large"), row(444, "small", "Card")]
    (tmp_path / "loader.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n<!-- rows: loaders{} -->\nold\n<!-- end rows -->\nafter\n"
    made = filled(page.format(""))
    assert made.startswith("before\n<!-- rows: loaders -->\n\n`loader.jsonl`, row 2: 2 cores of an CPU, no GPU")
    assert made.endswith("| A | 5 | 1 to 2 | 1.000 | 1.00 x (1.00 to 1.00) |\n\n<!-- end rows -->\nafter\n")
    assert filled(made) == made
    assert filled(page.format("-in-short")).count("| this loader | 222 | 1.00 x (1.00 to 1.00) |\n\n<!--") == 1
    assert "| this loader | 333 | 1 to 2 |" in filled(page.format("-large"))
    with pytest.raises(KeyError, match="-nothing"):
        filled(page.format("-nothing"))


def test_training_on_cards_is_a_table_of_their_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"cpu": "CPU", "gpu": "Card", "cores": 16, "date": "2030-01-01", "commit": "abc"}

    def row(rate: float, views: str = "gpu", card: str = "NVIDIA Card") -> dict[str, Any]:
        of = {"images_per_s": rate}
        return {"machine": machine, "card": card, "files": ["peclr_rn50", "h100"], "decoder": "gpu", "views": views,
                "with_loader": of, "in_memory": {"images_per_s": 2 * rate}, "waited_share": 0.004,
                "cores_busy": 1.7}  # fmt: skip

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"machine": machine, "precisions": []}) + "\n" + json.dumps(row(9, card="none")) + "\n")
    assert TABLES["gpu"]() == "No row of `bench-train` on a GPU yet."
    file.write_text("".join(f"{json.dumps(one)}\n" for one in (row(1), row(2, "dali"), row(3))))
    made = TABLES["gpu"]()
    assert made.startswith("`train.jsonl`, row 3: 16 cores of an CPU, Card")
    assert made.endswith(
        "| Card | peclr_rn50 h100 | gpu | gpu | 3 | 6 | 0.4% | 1.7 |\n"
        "| Card | peclr_rn50 h100 | gpu | dali | 2 | 4 | 0.4% | 1.7 |\n"
    )

"""The tables of README.md and docs/, which are those of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.documentation import fill_tables, pages_with_tables, write_docs
from errors import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def test_tables_are_those_of_the_last_rows(tmp_path: Path) -> None:
    page = "before\n<!-- rows: soak -->\nold\n<!-- end rows -->\nafter\n"
    assert "No row yet." in fill_tables(page, tmp_path)
    machine = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
    row = {
        "bench": "soak", "machine": machine, "settings": {"cores": 2}, "seconds": 3600, "images": 7,
        "memory_growth": 0.001, "history": [[0, 100, 6], [3600, 123, 6]],
    }  # fmt: skip
    (tmp_path / "soak.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"images": 8}) + "\n")
    made = fill_tables(page, tmp_path)
    assert made.startswith("before\n<!-- rows: soak -->\n")
    assert made.endswith("<!-- end rows -->\nafter\n")
    assert "`soak.jsonl`, row 2" in made
    assert "60 minutes, 8 images, memory +0.10%" in made
    assert fill_tables(made, tmp_path) == made


def test_claims_of_a_gpu_are_those_of_each_stages_last_true_run(tmp_path: Path) -> None:
    page = "<!-- rows: gpu -->\n<!-- end rows -->\n"
    machine = {"cpu": "CPU", "gpu": "Card", "cores": 2, "date": "2030-01-01", "commit": "abc"}

    def row(stage: str, found: str, holds: bool | None, *, dry_run: bool = False) -> str:
        claim = {"what": "figure", "found": found, "wanted": "at least 2 x", "holds": holds}
        return json.dumps({"stage": stage, "dry_run": dry_run, "machine": machine, "claims": [claim]}) + "\n"

    file = tmp_path / "gpu.jsonl"
    file.write_text(row("loader", "9 x", True, dry_run=True))
    assert "none of this has been measured" in fill_tables(page, tmp_path)
    file.write_text(
        row("loader", "1 x", False) + row("run", "3 s", None) + row("loader", "2 x", True)
        + row("loader", "9 x", True, dry_run=True)
    )  # fmt: skip
    made = fill_tables(page, tmp_path)
    assert "| loader | figure | 2 x | at least 2 x | yes | `gpu.jsonl`, row 3 |" in made
    assert "| run | figure | 3 s | at least 2 x |  | `gpu.jsonl`, row 2 |" in made
    assert "1 x" not in made
    assert "9 x" not in made
    assert made.count("2 cores of an CPU, Card, 2030-01-01") == 1


def test_tables_of_a_cpu_stay_those_of_a_cpu(tmp_path: Path) -> None:
    machine = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
    entry: dict[str, Any] = {"name": "this loader", "images_per_s": 1234, "interval": [1, 2], "cpu_ms_per_image": 1}
    rows: list[dict[str, Any]] = [
        {"machine": {**machine, "gpu": gpu}, "sources": "small", "loaders": [{**entry, "images_per_s": rate}]}
        for gpu, rate in (("none", 1234), ("Card", 9999))
    ]
    (tmp_path / "loader.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = fill_tables("<!-- rows: loaders -->\n<!-- end rows -->\n", tmp_path)
    assert "1234" in made
    assert "9999" not in made


def test_unknown_table_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one of loaders"):
        fill_tables("<!-- rows: nothing -->\n<!-- end rows -->", tmp_path)


@pytest.mark.parametrize("page", pages_with_tables(ROOT / "docs"), ids=lambda page: page.name)
def test_the_pages_hold_what_the_rows_say(page: Path) -> None:
    text = page.read_text()
    assert fill_tables(text, RESULTS) == text, "run 'python cli.py bench-docs'"


def test_the_pages_that_have_tables_still_have_them() -> None:
    tables = {page.name: page.read_text().count("<!-- rows: ") for page in pages_with_tables(ROOT / "docs")}
    assert tables.keys() == {"README.md", "cluster.md", "datasets.md", "performance.md", "results.md"}
    assert tables["README.md"] == 3
    assert tables["performance.md"] >= 6


def test_every_file_of_rows_is_read_by_a_page() -> None:
    text = "".join(page.read_text() for page in pages_with_tables(ROOT / "docs"))
    assert [file.name for file in RESULTS.glob("*.jsonl") if f"`{file.name}`, row" not in text] == []


def test_the_readme_and_the_page_are_made_from_the_same_row(tmp_path: Path) -> None:
    """By the command, of a page and of the README beside its folder."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    machine = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
    entry = {"name": "this loader", "interval": [1, 2], "cpu_ms_per_image": 1, "ours_is": [1, 1, 1]}
    rows = [{"machine": machine, "loaders": [{**entry, "images_per_s": rate}]} for rate in (111, 222)]
    (results / "loader.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (docs / "performance.md").write_text("<!-- rows: loaders -->\n<!-- end rows -->\n")
    (docs / "other.md").write_text("no table")
    (tmp_path / "README.md").write_text("<!-- rows: loaders-in-short -->\n<!-- end rows -->\n")
    assert write_docs(results, docs).count("\n") == 1
    for page in (docs / "performance.md", tmp_path / "README.md"):
        assert "222" in page.read_text()
        assert "`loader.jsonl`, row 2" in page.read_text()
        assert "111" not in page.read_text()
    assert (docs / "other.md").read_text() == "no table"


def test_a_proof_is_said_in_a_sentence_and_the_newest_row_counts(tmp_path: Path) -> None:
    machine = {"date": "2030-01-01"}
    rows = [{"bench": "world_sizes", "machine": machine, "steps": steps, "precision": "fp64",
             "largest_relative_difference": {"2": 1e-9, "4": 2e-9}} for steps in (10, 20)]  # fmt: skip
    (tmp_path / "world_sizes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text(json.dumps({"bench": "other", "machine": machine, "a_b": 1 / 3}) + "\n")
    made = fill_tables("<!-- rows: proofs -->\n<!-- end rows -->\n", tmp_path)
    assert "row 2, 2030-01-01 | 20 steps on 1 to 4 ranks see the same samples; the weights differ by at most" in made
    assert "a relative 2e-09 (fp64) |" in made
    assert "| `other.jsonl`, row 1, 2030-01-01 | a b 0.3333 |" in made  # a proof without a sentence
    assert "10 steps" not in made

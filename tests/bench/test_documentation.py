"""The tables of README.md and docs/, which are those of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.bench.pages.documentation import fill_tables, pages_with_tables, write_docs
from peclr_dali.errors import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def machine(gpu: str = "none") -> dict[str, Any]:
    return {"cpu": "CPU", "gpu": gpu, "cores": 2, "date": "2030-01-01", "commit": "abc"}


def loader_row(images_per_s: float, gpu: str = "none") -> dict[str, Any]:
    part = {"interval": [1, 2], "cpu_ms_per_image": 1, "cores_busy": 2, "ours_is": [1, 1, 1]}
    loaders = [{"name": "this loader", "images_per_s": images_per_s, **part}]
    stages = [{"name": name, "images_per_s": 3, **part} for name in ("read only", "decode only")]
    return {"machine": machine(gpu), "settings": {}, "loaders": loaders, "stages": stages}


def step_row(images_per_s: float, gpu: str = "none", **more: Any) -> dict[str, Any]:
    figures = {"images_per_s": {"cached": {"mean": images_per_s}}, "recompute": "0 of 16"}
    return {"machine": machine(gpu), "precisions": [figures], **more}


def write_rows(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_tables_of_a_gpu(tmp_path: Path) -> None:
    page = "<!-- rows: gpu-in-short -->\n<!-- end rows -->\n"
    assert "No row yet." in fill_tables(page, tmp_path)
    rows = [step_row(1, "NVIDIA Card", overlay="rtx_11gb", torch_memory_gib=9.5), step_row(9)]
    write_rows(tmp_path / "train.jsonl", *rows)
    write_rows(tmp_path / "loader.jsonl", loader_row(4000, "NVIDIA Card") | {"sources": "small"})
    step = {"machine": machine("NVIDIA Big"), "encoder": "resnet50", "precision": "bf16", "micro_batch": 128}
    plain, recorded = step | {"compile": False, "images_per_s": 128}, step | {"compile": True, "images_per_s": 256}
    write_rows(tmp_path / "gpu_steps.jsonl", plain, recorded | {"cuda_graph": True})
    loaded = step | {"in_memory_images_per_s": 250}
    cpu = loaded | {"pipelines": {"backend": "cpu"}, "images_per_s": [19, 18]}
    write_rows(tmp_path / "gpu_loaded.jsonl", cpu, loaded | {"pipelines": {}, "images_per_s": [9, 8]})
    assert [line for line in fill_tables(page, tmp_path).splitlines() if line.startswith("| ")][2:] == [
        "| compiled, one CUDA graph | Big | 250 |", "| plain step | Big | 128 |",
        "| compiled, one CUDA graph | Big | 256 |", "| with the loader, views from the CPU | Big | 18, 19 |",
        "| with the loader, views from the GPU | Big | 8, 9 |",
        "| plain step in 9.5 GiB: 0 of 16 computed twice | Card | 1 |", "| loader alone | Card | 4000 |",
    ]  # fmt: skip


def test_tables_of_a_cpu_stay_those_of_a_cpu(tmp_path: Path) -> None:
    write_rows(tmp_path / "loader.jsonl", loader_row(1234), loader_row(9999, "Card"))
    made = fill_tables("<!-- rows: loaders -->\n<!-- end rows -->\n", tmp_path)
    assert "| this loader | 1234 | 1 to 2 | 1.000 | 1.00 x (1.00 to 1.00) |" in made
    assert "The loader makes 1234 images/s; the processor limits it (100% of 2 cores busy), and reading takes" in made
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
    assert tables.keys() == {"README.md", "datasets.md", "performance.md", "results.md"}
    assert tables["README.md"] == 3
    assert tables["performance.md"] >= 5


def test_every_file_of_rows_is_read_by_a_page() -> None:
    text = "".join(page.read_text() for page in pages_with_tables(ROOT / "docs"))
    assert [file.name for file in RESULTS.glob("*.jsonl") if f"`{file.name}`, row" not in text] == []


def test_the_readme_and_the_page_are_made_from_the_same_row(tmp_path: Path) -> None:
    """By the command, of a page and of the README beside its folder."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    write_rows(results / "loader.jsonl", loader_row(111), loader_row(222))
    (docs / "performance.md").write_text("<!-- rows: loaders -->\n<!-- end rows -->\n")
    (docs / "other.md").write_text("no table")
    (tmp_path / "README.md").write_text("<!-- rows: loaders-in-short -->\n<!-- end rows -->\n")
    assert write_docs(results, docs) == [str(docs / "performance.md"), str(tmp_path / "README.md")]
    for page in (docs / "performance.md", tmp_path / "README.md"):
        assert "222" in page.read_text()
        assert "`loader.jsonl`, row 2" in page.read_text()
        assert "111" not in page.read_text()
    assert (docs / "other.md").read_text() == "no table"


def test_a_proof_is_a_sentence_and_the_newest_row_counts(tmp_path: Path) -> None:
    rows = [{"bench": "world_sizes", "machine": machine(), "steps": steps, "precision": "fp64",
             "largest_relative_difference": {"2": 1e-9, "4": 2e-9}} for steps in (10, 20)]  # fmt: skip
    write_rows(tmp_path / "world_sizes.jsonl", *rows)
    write_rows(tmp_path / "other.jsonl", {"bench": "other", "machine": machine(), "a_b": 1 / 3})
    made = fill_tables("<!-- rows: proofs -->\n<!-- end rows -->\n", tmp_path)
    assert "row 2, 2030-01-01 | 20 steps on 1 to 4 ranks see the same samples; the weights differ by at most" in made
    assert "a relative 2e-09 (fp64) |" in made
    assert "| `other.jsonl`, row 1, 2030-01-01 | a b 0.3333 |" in made  # a proof without a sentence
    assert "10 steps" not in made

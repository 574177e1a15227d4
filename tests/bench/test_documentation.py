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
    rate = {"mean": images_per_s, "interval": [1, 2], "repeats": [images_per_s] * 2}
    figures = {
        "precision": "bf16", "batch": 8, "micro_batch": 4, "recompute": "never", "step_s": [1, 1, 1],
        "images_per_s": {"cached": rate, "loaded": rate, "averaged": rate}, "waited_share": 0.01, "loader_share": 0.02,
        "optimizer_share": 0.03, "model_flop_per_s": 1e12, "flop_per_image": 1e9, "peak_memory_mib": 7,
        "device_memory_mib": 8,
    }  # fmt: skip
    config = {"encoder": {"name": "resnet18"}, "geometry": {"side_px": 64}}
    return {"machine": machine(gpu), "config": config, "precisions": [figures], **more}


def write_rows(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tables_are_those_of_the_last_rows(tmp_path: Path) -> None:
    page = "before\n<!-- rows: train -->\nold\n<!-- end rows -->\nafter\n"
    assert "No row yet." in fill_tables(page, tmp_path)
    write_rows(tmp_path / "train.jsonl", step_row(111), step_row(222), step_row(333, gpu="Card"))
    made = fill_tables(page, tmp_path)
    assert made.startswith("before\n<!-- rows: train -->\n")
    assert made.endswith("<!-- end rows -->\nafter\n")
    assert "`train.jsonl`, row 2: 2 cores of an CPU, no GPU, 2030-01-01, commit abc, resnet18 at 64 pixels" in made
    assert "| images/s, batches at hand | 222.0 (1.0 to 2.0) |" in made
    assert "| exact batch over averaged small ones | 1.00 (1.00 to 1.00) x |" in made
    assert fill_tables(made, tmp_path) == made


def test_what_a_gpu_measured_is_told_from_what_a_cpu_did(tmp_path: Path) -> None:
    page = "<!-- rows: gpu-measured -->\n<!-- end rows -->\n<!-- rows: gpu-in-short -->\n<!-- end rows -->\n"
    small = {"settings": {"repeats": 2}, "overlay": "rtx_11gb", "torch_memory_gib": 9.5}
    rows = [step_row(1, "NVIDIA Card", **small), step_row(7, "NVIDIA Card", overlay="a100"), step_row(9)]
    write_rows(tmp_path / "train.jsonl", *rows)
    write_rows(
        tmp_path / "loader.jsonl", loader_row(4000, "NVIDIA Card") | {"sources": "small", "settings": {"batch": 8}}
    )
    assert fill_tables(page, tmp_path).count("No row yet.") == 2
    step = {
        "machine": machine("NVIDIA Big") | {"torch": "2", "cuda": "13"}, "encoder": "resnet50", "side_px": 128,
        "precision": "bf16", "batch": 2048,
        "compile": False, "host_s": 0.5, "peak_gib": 5.0, "kernels": None, "busy_s": None,
    }  # fmt: skip
    steps = [step | {"micro_batch": n, "step_s": 1 / n, "images_per_s": n, "graphs_kept": 4} for n in (128, 512)]
    recorded = steps[0] | {"compile": True, "cuda_graph": True, "images_per_s": 256, "kernels": 1234, "busy_s": 0.25}
    other = steps[0] | {"machine": machine("NVIDIA Old") | {"torch": "2", "cuda": "13"}, "images_per_s": 9}
    big = machine("NVIDIA Big") | {"torch": "2", "cuda": "13", "date": "2029-01-01"}
    older = steps[0] | {"machine": big, "images_per_s": 77}
    large = recorded | {"encoder": "resnet152", "images_per_s": 66}
    write_rows(tmp_path / "gpu_steps.jsonl", other, older, *steps, large, recorded)
    kinds = [
        {"machine": machine("Card"), "kind": kind, "jitter": "hsv", "fill": 0} for kind in ("png", "jpeg", "fused")
    ]
    write_rows(tmp_path / "gpu_pixels.jsonl", *(row | {"mean": at / 10} for at, row in enumerate(kinds)))
    loaded = step | {"overlay": "h100", "in_memory_images_per_s": 250, "images_per_s": [9, 8], "waited_share": 0.125}
    cpu, gpu = loaded | {"pipelines": {"backend": "cpu"}}, loaded | {"pipelines": {}}
    many = {"hardware_queues": 32}
    rows = [
        gpu | {"images_per_s": [9, 8]},
        cpu | {"images_per_s": [19, 18], "hardware_queues": 8, "cores_busy": 5.4},
        gpu | {"images_per_s": [29, 28], "hardware_queues": 8},
        loaded | {"pipelines": {"batch": 7}, "also": "a stream", "images_per_s": [39, 38]},
        gpu | {"images_per_s": [49, 48]} | many,
        gpu | {"images_per_s": [59, 58], "also": "a stream"} | many,
        loaded | {"pipelines": {"hw_decoder_load": 0.0}, "images_per_s": [69, 68]} | many,
    ]
    write_rows(tmp_path / "gpu_loaded.jsonl", *rows)
    detailed, short = fill_tables(page, tmp_path).split("<!-- rows: gpu-in-short -->")
    assert "| Big | resnet50 | bf16 | 512 | no | no | 0.002 | 512 | 0.500 | - | - | 4 of 4 | 5.0 |" in detailed
    assert "| Big | resnet50 | bf16 | 128 | yes | yes | 0.008 | 256 | 0.500 | 0.250 | 1,234 | 4 of 16 |" in detailed
    assert "| Old | resnet50 | bf16 | 128 | no | no | 0.008 | 9 |" in detailed
    for line in (
        "- | 8 | 29, 28 | 250 | 12.5% | - |", '`backend = "cpu"` | 8 | 19, 18 | 250 | 12.5% | 5.4 |',
        "`batch = 7`, a stream | 8 | 39, 38 | 250 | 12.5% | - |", "- | 32 | 49, 48 | 250 | 12.5% | - |",
        "a stream | 32 | 59, 58 | 250 | 12.5% | - |", "`hw_decoder_load = 0.0` | 32 | 69, 68 | 250 | 12.5% | - |",
    ):  # fmt: skip
        assert f"| Big | {line}" in detailed
    assert "| images/s, with the loader | 1.0 (1.0 to 2.0) |" in detailed
    assert "of PNG files is 0.000 and of JPEG files is 0.100; of the fused kernel from" in detailed
    assert [line for line in short.splitlines() if line.startswith("| ")][2:] == [
        "| compiled, one CUDA graph | Big | 250 |", "| plain step | Old | 9 |", "| plain step | Big | 128 |",
        "| compiled, one CUDA graph | Big | 256 |", "| with the loader, views from the CPU | Big | 18, 19 |",
        "| with the loader, views from the GPU | Big | 48, 49 |",
        "| plain step in 9.5 GiB: never computed twice | Card | 1 |", "| loader alone | Card | 4000 |",
    ]  # fmt: skip


def test_figures_of_a_gpu_are_those_of_each_overlays_last_row(tmp_path: Path) -> None:
    page = "<!-- rows: gpu -->\n<!-- end rows -->\n"
    assert "No row of `bench-gpu` yet" in fill_tables(page, tmp_path)
    of = {"encoder": "resnet50", "loader_images_per_s": 4000}
    rows = [
        step_row(rate, "Card", overlay=name, **of) for name, rate in (("a100", 1), ("rtx_11gb", 1000), ("a100", 2000))
    ]
    write_rows(tmp_path / "gpu.jsonl", *rows)
    made = fill_tables(page, tmp_path)
    assert "- a100: resnet50, `gpu.jsonl`, row 3: 2 cores of an CPU, Card" in made
    assert "|  | a100 | rtx_11gb |" in made
    assert "| images/s, batches at hand | 2000.0 (1.0 to 2.0) | 1000.0 (1.0 to 2.0) |" in made
    assert "| loader alone over step | 2.00 x | 4.00 x |" in made


def test_an_estimate_is_the_newest_of_each_configuration_and_card(tmp_path: Path) -> None:
    page = "<!-- rows: gpu-estimate -->\n<!-- end rows -->\n"
    assert "No row yet." in fill_tables(page, tmp_path)
    row = {
        "machine": machine(), "configuration": "peclr_rn50", "precision": "bf16", "graphs": 16, "graphs_kept": 6,
        "peak_bytes": 3 * 2**30, "held_bytes": 2**29, "flop": 2e12, "bytes": 3e9, "computed_s": [0.5, 0.4, 0.7],
        "over_all_kept": 1.2, "products_share": 0.4, "peak_share": 0.2,
    }  # fmt: skip
    cards = (("A100", 15400), ("H100", 15400), ("A100", 13000))
    write_rows(tmp_path / "gpu_estimate.jsonl", *({**row, "gpu": gpu, "kernels": kernels} for gpu, kernels in cards))
    made = fill_tables(page, tmp_path)
    of_all = "6 of 16 | 3.0 | 0.50 | {} | 2.0 | 3 | 0.50 (0.40 to 0.70) | 1.20 x | 40% | 20% |"
    assert f"| peclr_rn50, bf16 | A100 | {of_all.format('13,000')}\n" in made
    assert f"| peclr_rn50, bf16 | H100 | {of_all.format('15,400')}\n" in made
    assert "15,400" not in made.replace(of_all.format("15,400"), "")


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
    assert tables["README.md"] == 2
    assert tables["performance.md"] >= 6


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

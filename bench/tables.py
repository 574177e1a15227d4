"""Fills the tables of loaders and GPUs in README.md and docs/performance.md from the rows of bench/results/.

`python -m peclr_dali.bench.tables` does so, between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from peclr_dali.bench.rows import Row, markdown, measured_on, rows_of

PAGES = [Path(__file__).resolve().parents[1] / page for page in ("README.md", "docs/performance.md")]
RESULTS = Path(__file__).parent / "results"
IN_SHORT = ("this loader", "OpenCV + DataLoader", "OpenCV + DataLoader, tuned", "DALI, plain")


def loaders(sources: str, *, short: bool = False) -> str:
    """The newest rates on a CPU of all loaders and of ours over theirs, from "small" or "large" sources."""
    rows = [row for row in rows_of(RESULTS / "loader.jsonl") if row["machine"]["gpu"] == "none"]
    row = [row for row in rows if row.get("sources") == sources][-1]
    heads = ["", "images/s", "95 % interval", "CPU ms per image", "this loader is (95 %)"]
    lines = [
        [
            one["name"], f"{one['images_per_s']:.0f}", "{:.0f} to {:.0f}".format(*one["interval"]),
            f"{one['cpu_ms_per_image']:.3f}", "{:.2f} x ({:.2f} to {:.2f})".format(*one["ours_is"]),
        ]
        for one in (*row["loaders"], *row["stages"])
        if not short or one["name"] in IN_SHORT
    ]  # fmt: skip
    shown = [0, 1, 4] if short else range(5)
    table = markdown([heads[n] for n in shown], [[line[n] for n in shown] for line in lines])
    return f"{measured_on(row)}\n\n{table}"


def _steps() -> list[Row]:
    """The newest step of each kind on each card."""
    kind = ("encoder", "precision", "micro_batch", "compile", "cuda_graph")
    return list({(_card(row), *map(row.get, kind)): row for row in rows_of(RESULTS / "gpu_steps.jsonl")}.values())


def _card(row: Row) -> str:
    return str(row["machine"]["gpu"]).removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def _cell(value: float | None, format: str) -> str:
    return format.format(value) if value else "-"


def gpu() -> str:
    """Steps on batches in memory."""
    heads = "card, encoder, precision, micro-batch, compiled, recorded, step (s), images/s, the host starts it in (s), "
    heads += "the GPU computes (s), kernels, graphs kept, peak GiB"
    lines = [
        [
            _card(row), row["encoder"], row["precision"], str(row["micro_batch"]), _cell(row.get("compile"), "yes"),
            _cell(row.get("cuda_graph"), "yes"), f"{row['step_s']:.3f}", str(row["images_per_s"]),
            f"{row['host_s']:.3f}", _cell(row["busy_s"], "{:.3f}"), _cell(row["kernels"], "{:,}"),
            f"{row['graphs_kept']} of {row['batch'] // row['micro_batch']}", str(row["peak_gib"]),
        ]
        for row in _steps()
    ]  # fmt: skip
    return f"{measured_on(_steps()[-1])}, and the rows before it.\n\n{markdown(heads.split(', '), lines)}"


def gpu_in_short() -> str:
    """Images/s of ResNet-50 on each card: the step alone, and with the loader in three rounds."""
    lines = [
        ["compiled, one CUDA graph" if row["compile"] else "plain step", _card(row), str(row["images_per_s"])]
        for row in _steps()
        if (row["encoder"], row["precision"], row["micro_batch"]) == ("resnet50", "bf16", 128)
        and row["compile"] == row.get("cuda_graph", False)
    ]
    loaded = [row for row in rows_of(RESULTS / "gpu_loaded.jsonl") if "also" not in row]
    for where, pipelines in (("CPU", {"backend": "cpu"}), ("GPU", {})):
        row = [row for row in loaded if row["pipelines"] == pipelines][-1]
        rates = map(str, sorted(row["images_per_s"]))
        lines.append([f"with the loader, views from the {where}", _card(row), ", ".join(rates)])
    return markdown(["ResNet-50, 128 px, exact gradient of 2048, bf16", "card", "images/s"], lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "loaders": lambda: loaders("small"),
    "loaders-large": lambda: loaders("large"),
    "loaders-in-short": lambda: loaders("small", short=True),
    "gpu": gpu,
    "gpu-in-short": gpu_in_short,
}


def filled(page: str) -> str:
    """The page's text, with its tables written again. A `KeyError` names a table that is unknown."""
    block = r"(?s)(<!-- rows: (\S+) -->\n).*?(<!-- end rows -->)"
    return re.sub(block, lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))

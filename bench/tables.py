"""Fills the tables of loaders and GPUs in README.md and docs/performance.md from the rows of bench/results/.

`python -m peclr_dali.bench.tables` does so, between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from peclr_dali.bench.rows import markdown, measured_on, rows_of

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


def gpu() -> str:
    """Training on GPUs: the newest row of `bench-train` for each card, its files and where pixels are made."""
    rows = [row for row in rows_of(RESULTS / "train.jsonl") if row.get("card", "none") != "none"]
    if not rows:
        return "No row of `bench-train` on a GPU yet."
    newest = {(row["card"], *row["files"], row["decoder"], row["views"]): row for row in rows}.values()
    heads = ["card", "files", "decoder", "views", "images/s in training", "in memory", "waited", "cores busy"]
    lines = [
        [
            row["card"].removeprefix("NVIDIA "), " ".join(row["files"]), row["decoder"], row["views"],
            f"{row['with_loader']['images_per_s']:.0f}", f"{row['in_memory']['images_per_s']:.0f}",
            f"{row['waited_share']:.1%}", str(row["cores_busy"]),
        ]
        for row in newest
    ]  # fmt: skip
    return f"{measured_on(rows[-1])}, and rows before it\n\n{markdown(heads, lines)}"


TABLES: Mapping[str, Callable[[], str]] = {
    "loaders": lambda: loaders("small"),
    "loaders-large": lambda: loaders("large"),
    "loaders-in-short": lambda: loaders("small", short=True),
    "gpu": gpu,
}


def filled(page: str) -> str:
    """The page's text, with its tables written again. A `KeyError` names a table that is unknown."""
    block = r"(?s)(<!-- rows: (\S+) -->\n).*?(<!-- end rows -->)"
    return re.sub(block, lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))

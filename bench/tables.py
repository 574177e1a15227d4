"""The tables of loaders and of training, from rows of bench/results/.

`python -m peclr_dali.bench.tables` fills those of README.md and docs/performance.md with the newest rows, between
`<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from peclr_dali.bench.rows import Row, markdown, read_rows

PAGES = [Path(__file__).resolve().parents[1] / page for page in ("README.md", "docs/performance.md")]
RESULTS = Path(__file__).parent / "results"
IN_SHORT = ("this loader", "OpenCV + DataLoader", "OpenCV + DataLoader, tuned", "DALI, plain")


def loaders(row: Row, names: Collection[str] = ()) -> str:
    """Rates of all loaders and parts, or of some, and how many times as fast ours is; intervals of 95 %."""
    heads = ["", "images/s (95 %)", "CPU ms/image", "cores busy", "this loader is (95 %)"]
    lines = [
        [
            one["name"],
            "{:.0f} ({:.0f} to {:.0f})".format(one["images_per_s"], *one["interval"]),
            f"{one['cpu_ms_per_image']:.3f}",
            f"{one['cores_busy']:.2f}",
            "{:.2f} x ({:.2f} to {:.2f})".format(*one["ours_is"]),
        ]
        for one in (*row["loaders"], *row["stages"])
        if not names or one["name"] in names
    ]
    return markdown(heads, lines)


def training_figures(row: Row) -> dict[str, str]:
    """Names and values of a row of `bench-train`; intervals of 95 %."""
    with_loader, in_memory = (
        "{:.1f} ({:.1f} to {:.1f})".format(row[way]["images_per_s"], *row[way]["interval"])
        for way in ("with_loader", "in_memory")
    )
    return {
        "card": row["card"].removeprefix("NVIDIA ") if row["card"] != "none" else row["device"],
        "files": " ".join(row["files"]),
        "decoder": row["decoder"],
        "views": row["views"],
        "images/s with the loader": with_loader,
        "images/s, batches in memory": in_memory,
        "waited for the loader": f"{row['waited_share']:.1%}",
        "cores busy": f"{row['cores_busy']:.1f}",
        "computed twice": row["computed_twice"],
        "peak MiB": str(row["peak_memory_mib"]),
        "MiB in use on the device": str(row["device_memory_mib"] or "-"),
    }


def loaders_on_cpu(names: Collection[str] = ()) -> str:
    """The newest row of loaders on a CPU, from small sources."""
    rows = _numbered("loader.jsonl")
    row = [one for one in rows if one["machine"]["gpu"] == "none" and one.get("sources") != "large"][-1]
    return f"{_measured_on(row)}\n\n{loaders(row, names)}"


def training_on_gpus() -> str:
    """The newest row of `bench-train` for each card, its files and where pixels are made."""
    rows = [row for row in _numbered("train.jsonl") if row.get("card", "none") != "none"]
    if not rows:
        return "No row of `bench-train` on a GPU yet."
    newest = {(row["card"], *row["files"], row["decoder"], row["views"]): row for row in rows}.values()
    figures = [training_figures(row) for row in newest]
    table = markdown([*figures[0]], [[*of_row.values()] for of_row in figures])
    return f"{_measured_on(rows[-1])}, and rows before it\n\n{table}"


def _numbered(name: str) -> list[Row]:
    return [{**row, "place": f"`{name}`, row {number}"} for number, row in enumerate(read_rows(RESULTS / name), 1)]


def _measured_on(row: Row) -> str:
    machine = row["machine"]
    where = f"{machine['cores']} cores of an {machine['cpu']}, " + machine["gpu"].replace("none", "no GPU")
    return f"{row['place']}: {where}, {machine['date']}, commit {machine['commit']}"


TABLES = {
    "loaders": loaders_on_cpu,
    "loaders-in-short": lambda: loaders_on_cpu(IN_SHORT),
    "gpu": training_on_gpus,
}


def filled(page: str) -> str:
    """The page's text, with its tables written again. A `KeyError` names a table that is unknown."""
    block = r"(?s)(<!-- rows: (\S+) -->\n).*?(<!-- end rows -->)"
    return re.sub(block, lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))

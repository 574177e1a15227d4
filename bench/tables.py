"""The tables of loaders and of training, from rows of bench/results/.

`python -m peclr_dali.bench.tables` fills that of loaders in docs/performance.md with the newest row, between
`<!-- rows: loaders -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from peclr_dali.bench.rows import Row, markdown, read_rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
LOADERS = Path(__file__).parent / "results" / "loader.jsonl"


def loaders(row: Row) -> str:
    """Rates of all loaders and parts, and how many times as fast ours is; intervals of 95 %."""
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


def loaders_on_cpu() -> str:
    """The newest row of loaders on a CPU, from small sources."""
    rows = [
        (row, f"`{LOADERS.name}`, row {number}")
        for number, row in enumerate(read_rows(LOADERS), 1)
        if row["machine"]["gpu"] == "none" and row.get("sources") != "large"
    ]
    row, place = rows[-1]
    machine = row["machine"]
    where = f"{machine['cores']} cores of an {machine['cpu']}, no GPU"
    return f"{place}: {where}, {machine['date']}, commit {machine['commit']}\n\n{loaders(row)}"


def filled(page: str) -> str:
    """The page's text, with its table written again."""
    block = r"(?s)(<!-- rows: loaders -->\n).*?(<!-- end rows -->)"
    return re.sub(block, lambda found: f"{found[1]}\n{loaders_on_cpu()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

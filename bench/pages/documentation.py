"""Writes the tables of README.md and docs/ from the rows of bench/results/, so that every figure has its row.

A table stands between `<!-- rows: NAME -->` and `<!-- end rows -->`; `TABLES` has the names, `templates/` the tables.
The name of a study's tables is "study" and the name of its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peclr_dali.bench.gpu import report
from peclr_dali.bench.gpu.command import table_lines
from peclr_dali.bench.loaders.compare import OURS, verdict
from peclr_dali.bench.loaders.peers import PEERS
from peclr_dali.bench.rows import Row, measured_on, rows_of
from peclr_dali.bench.studies.pictures import write_pictures
from peclr_dali.bench.studies.tables import overview, section
from peclr_dali.bench.training.report import lines
from peclr_dali.errors import UserError
from peclr_dali.writing import write_text

_BLOCK: Final = re.compile(r"(<!-- rows: ([a-z-]+(?: \w+)?) -->\n).*?(<!-- end rows -->)", re.DOTALL)

TABLES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "loaders": ("loaders", {"sources": "small", "part": "loaders", "short": False}),
    "stages": ("loaders", {"sources": "small", "part": "stages", "short": False}),
    "loaders-large": ("loaders", {"sources": "large", "part": "loaders", "short": False}),
    "stages-large": ("loaders", {"sources": "large", "part": "stages", "short": False}),
    "loaders-in-short": ("loaders", {"sources": "small", "part": "loaders", "short": True}),
    "train": ("train", {}),
    "gpu": ("gpu", {}),
    "gpu-measured": ("gpu_measured", {"short": False}),
    "gpu-in-short": ("gpu_measured", {"short": True}),
    "gpu-estimate": ("gpu_estimate", {}),
    "find-boxes": ("find_boxes", {}),
    "networks": ("networks", {}),
    "proofs": ("proofs", {}),
    "studies": ("studies", {}),
}
"""Name of a table -> its file in templates/, and values for it."""

_NOT_PROOFS: Final = {
    "loader", "train", "gpu", "gpu_estimate", "gpu_pixels", "gpu_steps", "gpu_loaded", "experiments", "find_boxes",
    "networks", "photographs",
}  # fmt: skip
"""Files of rows that have tables of their own; the other files are those of tests, for the table "proofs"."""


_IN_SHORT: Final = {OURS, "OpenCV + DataLoader", "OpenCV + DataLoader, tuned", "DALI, plain"}
"""The loaders of the README's tables."""


def write_docs(results: Path, docs: Path) -> list[str]:
    """Write the tables of the pages in `docs` and of the README.md beside it, and the pictures. Returns the paths."""
    pages = pages_with_tables(docs)
    for page in pages:
        write_text(page, fill_tables(page.read_text(), results))
    return [*map(str, pages), *write_pictures(results, docs / "images")]


def pages_with_tables(docs: Path) -> list[Path]:
    """The pages with a table of rows: pages in the folder `docs`, and the README.md beside it."""
    pages = [*sorted(docs.glob("*.md")), docs.parent / "README.md"]
    return [page for page in pages if page.exists() and _BLOCK.search(page.read_text())]


def fill_tables(text: str, results: Path) -> str:
    """The page's text, with its tables written again from the rows in the folder `results`.

    Raises:
        UserError: a table's name is unknown.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def last(name: str, *, on_gpu: bool = False, **wanted: str) -> Row | None:
        """The newest row of a file that was measured with or without a GPU, and has these values."""
        for row in reversed(list(rows_of(results / f"{name}.jsonl"))):
            has_gpu = row["machine"].get("gpu", "none") != "none"
            if has_gpu == on_gpu and all(row.get(k, v) == v for k, v in wanted.items()):
                return row
        return None

    def newest(name: str, *by: str) -> list[Row]:
        """The newest row of a file for each value of some keys, without which a row counts as named like the file.

        "machine.gpu" is the key "gpu" of the row's "machine".
        """

        def value(row: Any, key: str) -> str:
            for part in key.split("."):
                row = row.get(part, name)
            return str(row)

        rows = {tuple(value(row, key) for key in by): row for row in rows_of(results / f"{name}.jsonl")}
        return list(rows.values())

    templates.globals |= {
        "last": last,
        "newest": newest,
        "proofs": sorted({file.stem for file in results.glob("*.jsonl")} - _NOT_PROOFS),
        "measured": {OURS, *PEERS, "read only", "decode only"},
        "in_short": _IN_SHORT,
        "measured_on": measured_on,
        "verdict": verdict,
        "markdown": markdown,
        "train_lines": lines,
        "gpu_lines": table_lines,
        "estimate_heads": report.HEADS,
        "estimate_lines": report.lines,
        "estimate_explained": report.EXPLAINED,
    }

    def made(block: re.Match[str]) -> str:
        name, _, study = block[2].partition(" ")
        if name not in TABLES and name != "study":
            raise UserError(f"<!-- rows: {block[2]} -->: expected one of {', '.join(TABLES)}, or study and its name")
        file, values = TABLES.get(name, ("study", {}))
        if name in ("study", "studies"):
            values = section(results, study) if study else overview(results)
        table = templates.get_template(f"{file}.md.jinja").render(values).strip("\n")
        return f"{block[1]}\n{table}\n\n{block[3]}"

    return _BLOCK.sub(made, text)


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

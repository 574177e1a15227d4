"""Writes and reads the rows of bench/results/, and makes tables."""

import datetime
import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.parsing import parse_json, regular

Row = Mapping[str, Any]


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, memory, GPU, versions and commit."""
    import torch  # only here: its import takes seconds, and a file of rows is checked before

    from peclr_dali.train.runs.folder import versions

    cpu = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)  # psutil lacks it
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu[1] if cpu is not None else "unknown",
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **versions(),
    }


def append(file: Path, row: Row) -> None:
    """Add a row to a file. Several processes may append at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.write(f"{json.dumps(row)}\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of bench/results/. A file that cannot be read, or is not whole lines of JSON, is a `UserError`."""
    try:
        *lines, rest = regular(file).read_bytes().split(b"\n")
        if rest:
            raise ValueError("its last line has no newline")
        rows = [parse_json(line) for line in lines if line.strip()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is no object")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        expected = "expected one JSON object a line, as --record writes them. Name another file"
        raise UserError(f"{file}: holds no rows ({found}); {expected}") from error
    return rows


def append_new(file: Path, row: Row) -> None:
    """Add a row and this machine to a file, unless the file has the row, of whatever machine."""
    entry = json.loads(json.dumps(row, default=np.ndarray.tolist))
    if not file.exists() or all({**entry, "machine": known["machine"]} != known for known in read_rows(file)):
        append(file, {**entry, "machine": describe_machine()})


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its columns aligned."""
    rows = [heads, ["---"] * len(heads), *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in rows)


def study_tables(rows: Sequence[Row]) -> str:
    """The tables of a study in Markdown, from its rows: errors of constants and arms, and comparisons."""
    from peclr_dali.train.pose.metrics import METRICS  # only here: it imports SciPy

    arms: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "constant":
            arms |= {f"{name}, {row['on']}": [errors] for name, errors in row["constants"].items()}
        elif row["kind"] in ("arm", "map"):
            arms.setdefault(row["arm"], []).append(row)
    titles = {name: metric.title_and_unit for name, metric in METRICS.items()}
    titles |= {"rotation_error_px": "rotated, px of 128", "shift_error_px": "shifted, px of 128"}  # means of the maps
    metrics = [metric for metric in titles if any(metric in row for row in rows)]
    heads = ["mean and range over seeds; published", *(titles[metric] for metric in metrics)]
    errors = markdown(heads, [[arm, *(_cell(arms[arm], metric) for metric in metrics)] for arm in arms])
    heads = ["", "metric", "mean", "95 % interval", "better by", "published, %", "better than constants"]
    compared = [
        [
            f"{row['better']} minus {row['than']}", titles[row["metric"]], f"{row['mean']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}", f"{row['better_by_percent']:+.1f} %",
            f"{row['published_percent'] or '-'}", {True: "yes", False: "no", None: "-"}[row["beats_constants"]],
        ]
        for row in rows if row["kind"] == "comparison"
    ]  # fmt: skip
    return f"{errors}\n{markdown(heads, compared)}"


def _cell(rows: Sequence[Row], metric: str) -> str:
    """Mean and range over the rows of an arm, and the published figure."""
    values = [float(np.mean(row[metric])) for row in rows if metric in row]
    published = rows[0].get("published", {}).get(metric)
    text = f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
    return text if published is None else f"{text}; {published:g}"

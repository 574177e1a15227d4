"""Makes, prints, writes and reads the rows of bench/results/."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import click
import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console, RenderableType

from errors import UserError
from machine.cores import available_cores
from train.config.pretraining import Config
from train.config.tables import to_dict
from train.runs.folder import versions

_TABLE_WIDTH = 128  # a narrower terminal wraps the lines


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, memory, GPU, versions and commit."""
    found: dict[str, str | int] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return found | versions()


def _cpu_name() -> str:
    found = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)  # psutil lacks it
    return found[1] if found is not None else "unknown"


def data_tables(config: Config) -> dict[str, Any]:
    """The tables of a configuration that concern the loader."""
    tables = to_dict(config)
    return {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")}


def tell(row: dict[str, Any], *shown: RenderableType, as_json: bool, record: Path | None) -> None:
    """Print a row as JSON, or `shown` if it is given. Append the row to the file `record` if it is given."""
    if as_json:
        click.echo(json.dumps(row))
    else:
        for part in shown:
            if isinstance(part, str):
                click.echo(part)
            else:
                Console(width=max(Console().width, _TABLE_WIDTH)).print(part)
    if record is not None:
        append(record, row)


def append(record: Path, row: dict[str, Any]) -> None:
    """Add a row to a file.

    Raises:
        UserError: it cannot be written; the row is in the message.
    """
    line = json.dumps(row)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise UserError(f"{record}: cannot be written ({error.strerror}); the row is: {line}") from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of bench/results/.

    Raises:
        UserError: it cannot be read, or is not JSON lines.
    """
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}; expected a file of rows, such as bench/results/loader.jsonl"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: expected one JSON object a line, as --record writes them ({error})") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: expected one JSON object a line, as --record writes them")
    return rows


def yes_or_no(holds: bool | None) -> str:
    """Whether a claim holds, in a word."""
    return {True: "yes", False: "NO", None: ""}[holds]

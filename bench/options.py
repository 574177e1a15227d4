"""Options that the commands of bench/ share."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from peclr_dali.bounds import LARGEST_COUNT
from peclr_dali.errors import UserError
from peclr_dali.train.commands.options import FILE

F = TypeVar("F", bound=Callable[..., Any])


def _rows(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check before anything is measured that a file, if it is there, is one of rows."""
    if path is not None and path.exists():
        from peclr_dali.bench.rows import read_rows  # imported late, so that --help is fast

        try:
            read_rows(path)
        except UserError as error:
            raise UserError(f"{parameter.opts[0]} {error}") from error
    return path


def record_option(command: F) -> F:
    """Add `--record`, a file of rows."""
    text = "Append the result to this file as a line of JSON."
    return click.option("--record", type=FILE, callback=_rows, help=text)(command)


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--json` and `--record`. The command gets `tell`: it records its row, and prints it or tables."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table.")
    @record_option
    @wraps(command)
    def with_output(as_json: bool, record: Path | None, **options: Any) -> None:
        def tell(row: dict[str, Any], *shown: Any) -> None:
            from peclr_dali.bench import rows

            if record is not None:  # first, since the terminal may be gone
                rows.append(record, row)
            rows.show(*([json.dumps(row)] if as_json else shown))

        command(**options, tell=tell)

    return with_output


def rounds_options(repeats: int) -> Callable[[F], F]:
    """Add `--repeats` and `--seconds`."""
    rounds, seconds = click.IntRange(2, LARGEST_COUNT), click.FloatRange(0.1, 1e5)
    each, least = "Rounds; each measures everything once.", "Minimum length of a repeat."
    add_repeats = click.option("--repeats", default=repeats, show_default=True, type=rounds, help=each)
    add_seconds = click.option("--seconds", default=2.0, show_default=True, type=seconds, help=least)
    return lambda command: add_repeats(add_seconds(command))

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
from peclr_dali.train.commands.options import FILE, FiniteRange, IntegerRange

F = TypeVar("F", bound=Callable[..., Any])
ROUNDS = IntegerRange(2, LARGEST_COUNT)
SECONDS = FiniteRange(0.1, 1e5)


def _rows(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that a row can be appended to a file, before anything is measured."""
    if path is None:
        return None
    from peclr_dali.bench import rows  # imported late, so that --help is fast

    try:
        rows.require_appendable(path)
    except UserError as error:
        raise UserError(f"{parameter.opts[0]} {error}") from error
    return path


def record_option(command: F) -> F:
    """Add `--record`, a file of rows."""
    return click.option(
        "--record", type=FILE, callback=_rows, help="Append the result to this file as a line of JSON."
    )(command)


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--json` and `--record`. The command gets `tell`: it records its row, and prints it or tables."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table.")
    @record_option
    @wraps(command)
    def with_output(as_json: bool, record: Path | None, **options: Any) -> None:
        def tell(row: dict[str, Any], *shown: Any) -> None:
            from peclr_dali.bench import rows  # imported late, so that --help is fast

            if record is not None:  # first, since the terminal may be gone
                rows.append(record, row)
            if as_json:
                click.echo(json.dumps(row))
            else:
                rows.show(*shown)

        command(**options, tell=tell)

    return with_output


def rounds_options(repeats: int) -> Callable[[F], F]:
    """Add `--repeats` and `--seconds`."""

    least = "Minimum length of a repeat."
    seconds = click.option("--seconds", default=2.0, show_default=True, type=SECONDS, help=least)
    each = "Rounds; each measures everything once."
    rounds = click.option("--repeats", default=repeats, show_default=True, type=ROUNDS, help=each)
    return lambda command: rounds(seconds(command))

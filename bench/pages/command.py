"""The command that writes the tables of README.md and docs/."""

from __future__ import annotations

from pathlib import Path

import click

from peclr_dali.train.commands.options import FOLDER, PathOfUser


@click.command("bench-docs")
@click.option("--results", default="bench/results", show_default=True, type=FOLDER)
@click.option("--docs", default="docs", show_default=True, type=PathOfUser(path_type=Path, exists=True))
def bench_docs(results: Path, docs: Path) -> None:
    """Write the tables of README.md and docs/ and the pictures of docs/results.md from the rows of
    bench/results/."""
    from peclr_dali.bench.pages.documentation import write_docs

    click.echo("\n".join(write_docs(results, docs)))

"""The command that runs an experiment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench.commands import record_option
from train.commands.options import PATH


@click.command()
@click.argument("file", type=PATH)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key; repeatable.")
@record_option
def experiment(file: Path, overrides: Sequence[str], record: Path | None) -> None:
    """Run the experiment of FILE.toml: pre-train and fine-tune in several ways with several seeds, and compare.

    \b
      python cli.py experiment configs/studies/hands.toml --record bench/results/experiments.jsonl

    An interrupted experiment continues at the step where it stopped.
    """
    from experiments.config import load_experiment

    config = load_experiment(file, overrides)
    from rich.console import Console

    from experiments.run import as_table, run_experiment
    from train.distributed.interrupt import Interrupted
    from train.runs.log import configure_logging

    configure_logging()
    try:
        outcomes = run_experiment(config, record)
    except Interrupted as stop:
        click.echo(f"{stop.where}; continue by running this command again", err=True)
        sys.exit(stop.exit_code)
    Console().print(as_table(outcomes))

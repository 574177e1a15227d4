"""The command that runs a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.options import record_option
from train.commands.options import PATH


@click.command()
@click.argument("file", type=PATH)
@click.option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    show_default=True,
    help="small: rendered hands, minutes on a CPU; paper: the datasets and settings of the paper.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key; repeatable.")
@click.option("--arm", "only", multiple=True, metavar="NAME", help="Run this arm, not all of them; repeatable.")
@click.option("--list", "listed", is_flag=True, help="Print the commands of all runs, one a line, and run nothing.")
@record_option
def experiment(
    file: Path, scale: Any, overrides: Sequence[str], only: Sequence[str], listed: bool, record: Path | None
) -> None:
    """Run the study of FILE.toml: pre-train and measure in several ways with several seeds, and compare.

    \b
      python cli.py experiment configs/studies/compositions.toml --record bench/results/experiments.jsonl
      python cli.py experiment configs/studies/compositions.toml --set 'seeds=[0]'
      python cli.py experiment configs/studies/fidelity.toml --arm peclr --arm lars_off
      python cli.py experiment configs/studies/compositions.toml --scale paper --list

    An interrupted study continues at the step where it stopped. Several processes can run different seeds. A call that
    finds all runs finished only measures, compares and records; so the printed commands can be run on a cluster first.
    """
    from experiments.config import Plan, load_study
    from train.commands.options import say

    plan = Plan(file, load_study(file, overrides), scale, only)
    if listed:
        from experiments.jobs import commands_of

        for line in commands_of(plan, overrides, only):
            say(line)
        return
    from errors import UserError
    from pipelines.config import is_address

    for name, dataset in plan.used_data().items():
        if dataset.render is None and not is_address(dataset.root) and not Path(dataset.root).is_dir():
            raise UserError(
                f"{dataset.root}: no such folder; expected the images of scales.{scale}.data.{name}. Put them there, "
                f"or set scales.{scale}.data.{name}.root"
            )
    from rich.console import Console

    from experiments.compare import as_table
    from experiments.run import run_study
    from train.distributed.interrupt import Interrupted
    from train.runs.log import configure_logging

    configure_logging()
    try:
        outcomes = run_study(plan, record)
    except Interrupted as stop:
        click.echo(f"{stop.where}; continue by running this command again", err=True)
        sys.exit(stop.exit_code)
    if outcomes:
        Console().print(as_table(outcomes))

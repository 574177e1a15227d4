"""The command that runs a study."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peclr_dali.bench.options import record_option
from peclr_dali.train.commands.options import PATH, say

if TYPE_CHECKING:
    from peclr_dali.experiments.config import Plan


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
    Relative paths in FILE.toml count from the current folder, those of configs/studies from the checkout.
    """
    from peclr_dali.experiments.config import Plan, load_study

    plan = Plan(file, load_study(file, overrides), scale, only)
    plan.require_outside()
    if listed:
        for line in commands_of(plan, overrides, only):
            say(line)
        return
    plan.require_folders()
    from peclr_dali.bench.rows import as_table, show
    from peclr_dali.bench.studies.rows import COMPARISON_HEADS, comparison_cells
    from peclr_dali.experiments.run import run_study
    from peclr_dali.train.distributed.interrupt import Interrupted
    from peclr_dali.train.runs.log import configure_logging

    configure_logging()
    try:
        outcomes = run_study(plan, record)
    except Interrupted as stop:
        click.echo(f"{stop.where}; continue by running this command again", err=True)
        sys.exit(stop.exit_code)
    if outcomes:
        title = "better minus than, paired by seed and hand"
        show(as_table(title, COMPARISON_HEADS, map(comparison_cells, outcomes)))


def commands_of(plan: Plan, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[str]:
    """Shell commands of a study, each after what it needs; lines that begin with # are comments.

    `overrides` and `only` are those of `experiment`, for the last command.
    """
    from peclr_dali.train.config.finetuning import FinetuneConfig
    from peclr_dali.train.config.pretraining import Config

    def line(*words: object, files: Sequence[object] = (), keys: Sequence[str] = (), end: Sequence[object] = ()) -> str:
        options = [("-c", file) for file in files] + [("--set", key) for key in keys]
        return shlex.join(map(str, [*words, *(word for option in options for word in option), *end]))

    python, resume = ("python", "cli.py"), ("--resume", "auto")
    for root, one in {data.root: data.render for data in plan.used_data().values() if data.render is not None}.items():
        films = ("--sequences", one.sequences) if one.sequences else ()
        yield line(*python, "make-data", root, "--poses", one.poses, "--seed", one.seed, "--scenes", one.scenes, *films)
    seeds = plan.study.seeds
    starts = list(dict.fromkeys(plan.pretrain_seed(seed) for seed in seeds))
    if plan.pretrain:
        yield f"# pre-training: {len(plan.pretrain)} arms, {len(starts)} seeds"
    for seed, name in ((seed, name) for seed in starts for name in plan.pretrain):
        config, keys = plan.settings(Config, name, seed)
        processes = min(plan.at.processes, config.train.batch // config.train.micro_batch)
        launcher = ("torchrun", f"--nproc-per-node={processes}", "cli.py") if processes > 1 else python
        yield line(*launcher, "pretrain", files=plan.at.pretrain.config, keys=keys, end=resume)
    yield "# each network that is measured, when the run that it starts from is done"
    for seed, name in ((seed, name) for seed in seeds for name, arm in plan.arms.items() if arm.network is None):
        _, keys = plan.settings(FinetuneConfig, name, seed)
        yield line(*python, plan.by(name), files=plan.at.measured.config, keys=keys, end=resume)
    yield "# evaluation of each network; after fine-tuning with validation, of its best checkpoint"
    for seed, name in ((seed, name) for seed in seeds for name in plan.arms):
        out = ("--out", plan.folder(seed, "evaluation", name))
        yield line(*python, "evaluate", plan.run_of(name, seed), keys=plan.held_out(name, seed), end=out)
    yield "# when all runs are done: measure what the study compares, and record it"
    chosen = [*(word for name in only for word in ("--arm", name)), "--record", "bench/results/experiments.jsonl"]
    yield line(*python, "experiment", plan.file, "--scale", plan.scale, keys=overrides, end=chosen)

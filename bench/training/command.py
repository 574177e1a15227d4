"""The command that measures the training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from peclr_dali.bench.options import output_options, rounds_options
from peclr_dali.train.commands.options import config_options, pretraining_config


@click.command("bench-train")
@config_options
@rounds_options(5)
@output_options
def bench_train(
    files: Sequence[Path],
    overrides: Sequence[str],
    repeats: int,
    seconds: float,
    tell: Callable[..., None],
) -> None:
    """Measure the training step alone and with the loader.

    Does training wait for data?

    \b
      python cli.py bench-train -c configs/demo.toml
      python cli.py bench-train -c configs/peclr_rn50.toml -c configs/cards/a100.toml --record bench/results/train.jsonl
    """
    config = pretraining_config(files, overrides)
    from peclr_dali.bench.measure import Rounds
    from peclr_dali.bench.training import step
    from peclr_dali.train.runs.log import configure_logging, progress_bar

    configure_logging()
    rounds = Rounds(repeats=repeats, repeat_s=seconds, warmup_s=1.0)
    with progress_bar("stepping") as progress:
        row = step.bench_train(config, [file.stem for file in files], rounds, progress)
    tell(row, step.as_table_of(row))

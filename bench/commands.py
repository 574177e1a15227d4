"""The commands that measure: the loader beside other loaders, and the training step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from peclr_dali.bounds import LARGEST_COUNT
from peclr_dali.errors import UserError
from peclr_dali.train.commands.options import FILE, F, Number, config_options, pretraining_config

REPEATS = click.IntRange(2, LARGEST_COUNT)
EACH = "Rounds; each measures everything once."
SECONDS = Number(0.1, 1e5)
LEAST = "Minimum length of a repeat."


def record_option(command: F) -> F:
    """Add `--record`, a file of rows. It is read before anything is measured, in case that it is another file."""
    text = "Append the result to this file as a line of JSON."
    return click.option("--record", type=FILE, callback=_readable, help=text)(command)


def _readable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    from peclr_dali.bench.rows import read_rows  # imported late, so that --help is fast

    if path is not None and path.exists():
        read_rows(path)
    return path


@click.command("bench-loader")
@config_options
@click.option("--batch", default=256, show_default=True, type=click.IntRange(1, 65536), help="Images in a batch.")
@click.option("--repeats", default=7, show_default=True, type=REPEATS, help=EACH)
@click.option("--seconds", default=2.0, show_default=True, type=SECONDS, help=LEAST)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Measure other loaders too.")
@record_option
def bench_loader(
    files: Sequence[Path],
    overrides: Sequence[str],
    batch: int,
    repeats: int,
    seconds: float,
    peers: bool,
    record: Path | None,
) -> None:
    """Measure our loader, its parts and other loaders.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-loader
      taskset -c 0-3 python cli.py bench-loader --record bench/results/loader.jsonl

    All have the same cores. A peer whose package is not installed is left out, and a line says so.
    """
    config = pretraining_config(files, overrides)
    from peclr_dali.bench.measure import Rounds
    from peclr_dali.pipelines.sources import load_index

    # Too few images are refused before torch is imported, which takes longer than to list them.
    if (count := len(index := load_index(config.data))) < batch:
        raise UserError(f"{index.root} has {count} images, fewer than --batch {batch}: use more, or --batch {count}")
    from peclr_dali.bench.loaders import OurLoader, compare_loaders, table_of
    from peclr_dali.train.distributed.world import described_world
    from peclr_dali.train.runs.log import progress_bar

    ours = OurLoader(index, config, batch, described_world(config.train.device).device)
    with progress_bar("measuring") as progress:
        row = compare_loaders(ours, Rounds(repeats=repeats, repeat_s=seconds), peers=peers, progress=progress)
    _report(row, f"{table_of(row)}\n{row['verdict']}", record)


@click.command("bench-train")
@config_options
@click.option("--repeats", default=5, show_default=True, type=REPEATS, help=EACH)
@click.option("--seconds", default=2.0, show_default=True, type=SECONDS, help=LEAST)
@record_option
def bench_train(
    files: Sequence[Path], overrides: Sequence[str], repeats: int, seconds: float, record: Path | None
) -> None:
    """Measure the training step alone and with the loader.

    Does training wait for data?

    \b
      python cli.py bench-train -c configs/demo.toml
      python cli.py bench-train -c configs/peclr_rn50.toml -c configs/cards/a100.toml --record bench/results/train.jsonl
    """
    config = pretraining_config(files, overrides)
    from peclr_dali.bench import training
    from peclr_dali.bench.measure import Rounds
    from peclr_dali.bench.rows import markdown
    from peclr_dali.train.runs.log import progress_bar

    rounds = Rounds(repeats=repeats, repeat_s=seconds, warmup_s=1.0)
    with progress_bar("stepping") as progress:
        row = training.bench_train(config, [file.stem for file in files], rounds, progress)
    _report(row, markdown(["", row["precision"]], training.figures_of(row).items()), record)


def _report(row: dict[str, Any], text: str, record: Path | None) -> None:
    from peclr_dali.bench.rows import append

    click.echo(text)
    if record is not None:
        append(record, row)

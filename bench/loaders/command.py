"""The command that measures the loader and other loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from peclr_dali.bench.options import output_options, rounds_options
from peclr_dali.train.commands.options import config_options, pretraining_config


@click.command("bench-loader")
@config_options
@click.option("--batch", default=256, show_default=True, type=click.IntRange(1, 65536), help="Images in a batch.")
@rounds_options(7)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Measure other loaders too.")
@click.option("--large", is_flag=True, help="Measure on 1280 x 720 frames, made from the configured images of hands.")
@output_options
def bench_loader(
    files: Sequence[Path],
    overrides: Sequence[str],
    batch: int,
    repeats: int,
    seconds: float,
    peers: bool,
    large: bool,
    tell: Callable[..., None],
) -> None:
    """Measure our loader, its parts and other loaders.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-loader
      python cli.py bench-loader --record bench/results/loader.jsonl
      taskset -c 0-3 python cli.py bench-loader --large

    All have the same cores. On a GPU it measures the peers that decode there too. A peer that cannot run here is left
    out, and a line says why.
    """
    config = pretraining_config(files, overrides)
    from peclr_dali.bench.loaders.frames import large_frames
    from peclr_dali.bench.measure import Rounds, require_images
    from peclr_dali.pipelines.sources import load_index

    # Before torch is imported, which takes longer than to list the images.
    if large:
        config = dataclasses.replace(config, data=(large_frames(config.data),))
    require_images(len(index := load_index(config.data)), batch, index.root)
    from peclr_dali.bench.loaders.compare import as_tables, compare_loaders
    from peclr_dali.train.distributed.world import described_world
    from peclr_dali.train.runs.log import configure_logging, progress_bar

    configure_logging()
    rounds, device = Rounds(repeats=repeats, repeat_s=seconds), described_world(config.train.device).device
    with progress_bar("measuring") as progress:
        row = compare_loaders(config, rounds, batch=batch, peers=peers, device=device, large=large, progress=progress)
    tell(row, *as_tables(row))

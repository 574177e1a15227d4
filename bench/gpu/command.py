"""The command that measures step and loader on a GPU with the settings that are shipped for cards, or estimates steps
without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from peclr_dali.errors import UserError
from peclr_dali.train.commands.options import FOLDER, config_options, pretraining_config, say

if TYPE_CHECKING:
    from peclr_dali.bench.rows import Row

_ROOT: Final = Path(__file__).parents[2]

OVERLAYS: Final = {"rtx_11gb": 11 * 2**30, "rtx_24gb": 24 * 2**30, "a100": None, "h100": None}
"""File of configs/cards/ -> bytes of memory of such a card; None: the memory of this card."""

SHIPPED: Final = ("peclr_rn50", "peclr_rn152", "simclr_rn50")
"""Files of configs/ whose steps are estimated unless others are given."""


@click.command("bench-gpu")
@config_options
@click.option("--out", default="runs/gpu", show_default=True, type=FOLDER, help="Folder for the rows.")
@click.option(
    "--card", "cards", multiple=True, type=click.Choice(OVERLAYS), help="Measure only this overlay; repeatable."
)
@click.option("--estimate", is_flag=True, help="Count steps on a card of make-believe, without a GPU; time nothing.")
def bench_gpu(files: Sequence[Path], overrides: Sequence[str], out: Path, cards: Sequence[str], estimate: bool) -> None:
    """Measure step and loader on this GPU with the settings that are shipped for cards, and print a table.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-gpu --set data.root=.data/hands
      python cli.py bench-gpu -c configs/peclr_rn152.toml --card h100 --set data.root=.data/hands
      python cli.py bench-gpu --estimate

    With --estimate, memory, kernels and operations of a step are counted on a card of make-believe, for six cards and
    the three configurations of pre-training or that of -c, and the time is computed from them. It takes some minutes
    and needs a C compiler, but no GPU and no data. Rows are in --out, in gpu_estimate.jsonl.

    Without -c, configs/peclr_rn50.toml is measured. On a card with more memory than the settings are for, torch may use
    only its part of the smaller memory. Weights are random. Rows for bench/results/ are written to --out. Exit code 1
    if a measurement fails; the others still run.
    """
    if estimate and cards:
        raise UserError("--estimate counts for all cards: leave out --card.")
    each = [list(files)] if files else [[_ROOT / "configs" / f"{name}.toml"] for name in SHIPPED]
    files = each[0]
    for name in OVERLAYS:  # before anything is measured
        for one in each if estimate else [files]:
            pretraining_config([*one, _overlay(name)], overrides)
    if estimate:
        sys.exit(1 if _estimate(each, overrides, out / "gpu_estimate.jsonl") else 0)
    import torch

    if not torch.cuda.is_available():
        raise UserError("torch finds no GPU: check nvidia-smi. On a CPU, use bench-train and bench-loader.")
    from peclr_dali.bench.rows import append, as_table, require_appendable, show

    total = torch.cuda.get_device_properties(0).total_memory
    for name in ("gpu", "train", "loader"):
        require_appendable(out / f"{name}.jsonl")
    rows = []
    measured = {name: OVERLAYS[name] for name in cards or OVERLAYS}
    for name, card_bytes in measured.items():
        words = [word for file in (*files, _overlay(name)) for word in ("-c", str(file))]
        words += [word for setting in (*overrides, "encoder.weights=random") for word in ("--set", setting)]
        environment = limited(card_bytes, total)
        train = _measure("bench-train", [*words, "--repeats", "2"], out / "train.jsonl", environment)
        words += ["--no-peers", "--repeats", "3"]
        loader = _measure("bench-loader", words, out / "loader.jsonl", environment)
        if train is not None and loader is not None:
            rows.append(row_of(name, train, loader))
            append(out / "gpu.jsonl", rows[-1])
    if rows:
        title = f"{rows[0]['machine']['gpu']}, {rows[0]['encoder']}; rows are in {out}"
        show(as_table(title, ("", *(row["overlay"] for row in rows)), table_lines(rows)))
    sys.exit(0 if len(rows) == len(measured) else 1)


def _estimate(configurations: Sequence[Sequence[Path]], overrides: Sequence[str], file: Path) -> int:
    """Print a table of steps, and write a row for each configuration and card when it is found. Returns how many
    cannot be counted."""
    from peclr_dali.bench.gpu import estimate, report
    from peclr_dali.bench.gpu.card.environment import card_environment
    from peclr_dali.bench.rows import append, as_table, describe_machine, require_appendable, show

    require_appendable(file)
    with card_environment():  # without a compiler, refused once
        pass
    machine, rows, failed = describe_machine(), [], 0
    for files, gpus in product(configurations, estimate.groups()):
        configuration = " ".join([*(one.stem for one in files), *overrides])
        click.echo(f"{configuration} on {' and '.join(gpu.name for gpu in gpus)}", err=True)
        try:
            found = estimate.figures_of(files, overrides, gpus)
        except UserError as error:
            say(str(error), err=True)
            failed += 1
            continue
        for figures in found:
            rows.append({"bench": "gpu_estimate", "machine": machine, "configuration": configuration, **figures})
            append(file, rows[-1])
    if rows:
        show(as_table(f"A training step; rows are in {file}", report.HEADS, report.lines(rows)), report.EXPLAINED)
    return failed


def _overlay(name: str) -> Path:
    return _ROOT / "configs" / "cards" / f"{name}.toml"


def _measure(command: str, words: Sequence[str], record: Path, environment: dict[str, str]) -> Row | None:
    """The row of a command in a process of its own, so that memory of one does not count for the next; None: failed."""
    line = [sys.executable, "-P", "-m", "peclr_dali", command, *words, "--json", "--record", str(record)]
    paths = filter(None, [str(_ROOT.parent), environment.get("PYTHONPATH")])
    environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
    click.echo(" ".join(line), err=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    if done.returncode != 0:
        click.echo(f"{command} failed with exit code {done.returncode}: see its message above", err=True)
        return None
    row: Row = json.loads(done.stdout)
    return row


def limited(card_bytes: float | None, total_bytes: float) -> dict[str, str]:
    """The environment of a process whose torch takes its part of a smaller card's memory; unchanged for None."""
    if card_bytes is None:
        return dict(os.environ)
    from peclr_dali.train.steps.memory import HEADROOM_BYTES  # torch, only here

    share = min(1.0, (card_bytes - HEADROOM_BYTES) / total_bytes)
    options = [os.environ.get("PYTORCH_ALLOC_CONF", ""), f"per_process_memory_fraction:{share:.4f}"]
    return {**os.environ, "PYTORCH_ALLOC_CONF": ",".join(filter(None, options))}


def row_of(overlay: str, train: Row, loader: Row) -> dict[str, Any]:
    """The row of an overlay, from those of `bench-train` and `bench-loader`."""
    return {
        "bench": "gpu",
        "machine": train["machine"],
        "overlay": overlay,
        "encoder": train["config"]["encoder"]["name"],
        "precisions": train["precisions"],
        # A step counts a pair as one image.
        "loader_images_per_s": loader["loaders"][0]["images_per_s"] / loader.get("images_per_row", 1),
        "verdict": loader["verdict"],
    }


def table_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Lines of a table of rows: the heading, then a cell for each row."""
    from peclr_dali.bench.training.report import lines

    steps = [row["precisions"][0] for row in rows]
    yield ("precision", *(one["precision"] for one in steps))
    yield from lines({"precisions": steps})
    yield ("loader alone, images/s", *(f"{row['loader_images_per_s']:.0f}" for row in rows))
    ratios = [
        row["loader_images_per_s"] / one["images_per_s"]["cached"]["mean"] for row, one in zip(rows, steps, strict=True)
    ]
    yield ("loader alone over step", *(f"{ratio:.2f} x" for ratio in ratios))

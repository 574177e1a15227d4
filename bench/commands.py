"""Commands that measure the loader, the training step, the ranks and a GPU; bench-docs writes the tables."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from bounds import LARGEST_COUNT
from errors import UserError
from train.commands.options import (
    COUNT,
    FILE,
    FOLDER,
    PATH,
    WORKERS,
    FiniteRange,
    IntegerRange,
    PathOfUser,
    config_options,
    pretraining_config,
)

F = TypeVar("F", bound=Callable[..., Any])
ROUNDS = IntegerRange(2, LARGEST_COUNT)
SECONDS = FiniteRange(0.1, 1e5)


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that a file can be written, before anything is measured."""
    if path is None:
        return None
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise UserError(f"{parameter.opts[0]} {path}: cannot be written ({error.strerror}). Name another.") from error
    return path


def _rows(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that a file can take rows: it is new, or holds rows already."""
    if path is not None and path.is_file():
        with path.open("rb") as file:
            start = file.read(100).lstrip()
        if start and not start.startswith(b"{"):
            raise UserError(f"{parameter.opts[0]} {path}: holds no rows of JSON to append to. Name another file.")
    return _writable(context, parameter, path)


def _picture(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that a picture can be written."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{parameter.opts[0]} {path}: expected a name that ends in .png, .svg or .pdf")
    return _writable(context, parameter, path)


def record_option(command: F) -> F:
    """Add `--record`, a file of rows."""
    return click.option(
        "--record", type=FILE, callback=_rows, help="Append the result to this file as a line of JSON."
    )(command)


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--json` and `--record`. The command gets `tell`, a function that prints and records its row accordingly."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table.")
    @record_option
    @wraps(command)
    def with_output(as_json: bool, record: Path | None, **options: Any) -> None:
        def tell(row: dict[str, Any], *shown: Any) -> None:
            from bench import rows  # imported late, so that a wrong configuration is reported first

            rows.tell(row, *shown, as_json=as_json, record=record)

        command(**options, tell=tell)

    return with_output


def rounds_options(repeats: int) -> Callable[[F], F]:
    """Add `--repeats` and `--seconds`."""

    least = "Minimum length of a repeat."
    seconds = click.option("--seconds", default=2.0, show_default=True, type=SECONDS, help=least)
    each = "Rounds; each measures everything once."
    rounds = click.option("--repeats", default=repeats, show_default=True, type=ROUNDS, help=each)
    return lambda command: rounds(seconds(command))


_COMPARING = ("repeats", "peers", "pixels", "step", "plot", "compare")
"""Parameters of `bench-loader` that only the comparison of loaders uses."""
_UNUSED = {
    "tune": (*_COMPARING, "record", "as_json"),
    "soak_minutes": (*_COMPARING, "seconds"),
    "first_batch": (*_COMPARING, "seconds"),
}
"""Parameter of `bench-loader` that asks for another measurement -> the parameters that this one does not use."""


def _refuse_unused(context: click.Context) -> None:
    """Refuse two of the measurements of `_UNUSED`, and options that the chosen one does not use."""
    options = {one.name: one.opts[0] for one in context.command.params if one.name is not None}
    given = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    chosen = [name for name in given if name in _UNUSED]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(options[name] for name in chosen)} exclude each other: give one of them")
    if unused := [options[name] for name in given if chosen and name in _UNUSED[chosen[0]]]:
        raise UserError(f"{', '.join(unused)}: not used by {options[chosen[0]]}. Leave it out")


@click.command("bench-loader")
@config_options
@click.option("--cores", default=None, type=WORKERS, help="Cores that every loader may use.  [default: all]")
@click.option("--batch", default=256, show_default=True, type=IntegerRange(1, 65536), help="Images in a batch.")
@rounds_options(7)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Measure other loaders too.")
@click.option(
    "--pixels",
    type=PATH,
    metavar="FOLDER",
    help="Also measure our loader on the same images, packed there by pack --pixels.",
)
@click.option(
    "--large",
    is_flag=True,
    help="Measure on 1280 x 720 frames that contain a hand; they are made from the configured images.",
)
@click.option("--step", is_flag=True, help="Measure the training step too, to say whether it waits for the loader.")
@click.option("--plot", type=FILE, callback=_picture, metavar="OUT.png", help="Write a chart to this file.")
@output_options
@click.option(
    "--compare",
    metavar="FILE[:NUMBER]",
    help="Exit with 1 if our loader is slower than in this row (default: the last), and the intervals do not overlap.",
)
@click.option(
    "--tune", is_flag=True, help="Instead: find the loader's fastest settings on this machine and print them as TOML."
)
@click.option(
    "--soak",
    "soak_minutes",
    type=FiniteRange(0.1, 1e5),
    metavar="MINUTES",
    help="Instead: run our loader for MINUTES; exit with 1 if, after the first minute, memory changes by more than 2 %"
    " or more files are open.",
)
@click.option(
    "--first-batch", is_flag=True, help="Instead: measure the time to read the index and to make the first batch."
)
def bench_loader(
    files: Sequence[Path],
    overrides: Sequence[str],
    cores: int | None,
    batch: int,
    repeats: int,
    seconds: float,
    peers: bool,
    pixels: Path | None,
    large: bool,
    step: bool,
    plot: Path | None,
    compare: str | None,
    tune: bool,
    soak_minutes: float | None,
    first_batch: bool,
    tell: Callable[..., None],
) -> None:
    """Measure our loader, its parts and other loaders on the same cores, and tell whether training is loader-bound.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-loader --step --plot loader.png
      python cli.py bench-loader --tune
      python cli.py bench-loader --record bench/results/loader.jsonl
      python cli.py bench-loader --soak 60 --record bench/results/soak.jsonl
    """
    _refuse_unused(click.get_current_context())
    if large and pixels is not None:
        raise UserError("--large makes other images than those of --pixels: give one of them")
    config = pretraining_config(files, overrides)
    if not large:  # before torch is imported, which takes longer than to list the images
        from bench.measure import require_images
        from pipelines.sources import load_index

        require_images(len(index := load_index(config.data)), batch, index.root)
    from bench.loaders import first_batch as beginning
    from bench.loaders import report, soak
    from bench.loaders import tune as tuning
    from bench.loaders.compare import compare_loaders, conditions
    from bench.loaders.frames import large_frames
    from bench.loaders.ours import LoaderSettings
    from bench.training.step import StepSettings, cached_rate
    from machine.cores import available_cores
    from train.distributed.world import described_world
    from train.runs.log import configure_logging, progress_bar

    configure_logging()
    settings = LoaderSettings(
        cores=cores or available_cores(),
        batch=batch,
        repeats=repeats,
        repeat_s=seconds,
        pixels=None if pixels is None else str(pixels),
        peers=peers,
    )
    device = described_world(config.train.device).device
    of_step = config  # the step takes batches of the dataset itself, which may have more images than there are frames
    if large:
        config = dataclasses.replace(config, data=large_frames(config.data))
    if tune:
        with progress_bar("tuning") as progress:
            best = tuning.tune(config, settings, device, progress)
        click.echo(tuning.as_toml(*best), nl=False)
        return
    if soak_minutes is not None:
        with progress_bar("soaking (s)") as progress:
            row = soak.soak(config, settings, soak_minutes * 60, progress, device)
        tell(row, soak.summary(row))
        sys.exit(0 if row["steady"] else 1)
    if first_batch:
        row = beginning.first_batch(config, settings, device)
        tell(row, beginning.summary(row))
        return
    before = report.find_row(compare) if compare is not None else None
    sources = "large" if large else "small"
    if before is not None:
        report.require_comparable(before, conditions(config, settings, sources))
    needed = cached_rate(of_step, StepSettings()) if step else None
    with progress_bar("measuring") as progress:
        row = compare_loaders(config, settings, device=device, sources=sources, step=needed, progress=progress)
    tell(row, *report.as_tables(row), row["verdict"])
    if plot is not None:
        report.save_plot(row, plot)
    slower = report.regression(before, row) if before is not None else None
    if slower is not None:
        click.echo(f"error: {slower}", err=True)
        sys.exit(1)


@click.command("bench-train")
@config_options
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp64", "fp32", "bf16", "fp16"]),
    help="Precision to measure; repeatable.  [default: fp32 and bf16; on a GPU fp16 too]",
)
@rounds_options(5)
@output_options
def bench_train(
    files: Sequence[Path],
    overrides: Sequence[str],
    precisions: Sequence[str],
    repeats: int,
    seconds: float,
    tell: Callable[..., None],
) -> None:
    """Measure the training step on batches in memory and with the loader, and the cost of the exact large batch.

    \b
      python cli.py bench-train -c configs/demo.toml
      python cli.py bench-train -c configs/peclr_rn50.toml -c configs/a100.toml --record bench/results/train.jsonl
    """
    config = pretraining_config(files, overrides)
    from bench.training import report, step
    from train.distributed.world import described_world
    from train.runs.log import configure_logging, progress_bar

    configure_logging()
    settings = step.StepSettings(repeats=repeats, repeat_s=seconds)
    if not precisions:
        device = described_world(config.train.device).device
        precisions = ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")
    with progress_bar("stepping") as progress:
        found = step.bench_train(config, precisions, settings, progress)
    tell(report.as_json(found, config, settings), report.as_table(found))


@click.command("bench-gpu")
@click.option("--stage", "stages", multiple=True, metavar="NAME", help="Stage to run; repeatable.  [default: all]")
@click.option("--data", default=".data/hands", show_default=True, type=PATH, help="Folder that make-data wrote.")
@click.option("--out", default="runs/gpu", show_default=True, type=FOLDER)
@click.option("--dry-run", is_flag=True, help="Run every stage at toy size, on any device; its figures mean nothing.")
@click.option(
    "--estimate",
    "only_estimate",
    is_flag=True,
    help="Instead: compute what the GPU path should cost, without a GPU; -c, --set, --card and --source belong to it.",
)
@click.option(
    "--card", "cards", multiple=True, help="A card's name, or NAME,GB/s,TFLOP/s; repeatable.  [default: all known]"
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="WxH[:BOX]",
    help="Size of an image and side of its box with margin, in pixels; repeatable.  [default: 224x224, 1280x720:375]",
)
@config_options
def bench_gpu(
    stages: Sequence[str],
    data: Path,
    out: Path,
    dry_run: bool,
    only_estimate: bool,
    cards: Sequence[str],
    sources: Sequence[str],
    files: Sequence[Path],
    overrides: Sequence[str],
) -> None:
    """Check the project's claims about GPUs on this machine. Prints a table; --out gets rows for bench/results/.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-gpu
      python cli.py bench-gpu --stage loader --stage memory-11gb
      python cli.py bench-gpu --estimate -c configs/peclr_rn50.toml --card "RTX 3090" --source 640x480

    Each stage can run alone. Exit code 1 if a claim does not hold.
    """
    if only_estimate:
        if stages or dry_run:
            raise UserError("--estimate measures nothing: leave out --stage and --dry-run")
        _show_estimate(cards, sources, files, overrides)
        return
    given = {"--card": cards, "--source": sources, "-c": files, "--set": overrides}
    for name, values in given.items():
        if values:
            raise UserError(f"{name}: it belongs to --estimate; the stages have their own configurations")
    import torch

    from bench.gpu.claims import Job
    from bench.gpu.prove import STAGES, prove

    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        raise UserError(f"--stage {unknown[0]}: expected one of {', '.join(STAGES)}")
    if not (dry_run or torch.cuda.is_available()):
        raise UserError("torch finds no GPU: check nvidia-smi, or use --dry-run")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.jsonl").touch()
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to ({error.strerror}). Name another folder.") from error
    if dry_run:
        data = out / "hands"
    elif not data.is_dir():
        raise UserError(f"--data {data} is not a folder: make it with 'python cli.py make-data {data}'")
    sys.exit(0 if prove(stages or list(STAGES), Job(out.absolute(), data.absolute(), dry_run)) else 1)


def _show_estimate(
    cards: Sequence[str], sources: Sequence[str], files: Sequence[Path], overrides: Sequence[str]
) -> None:
    config = pretraining_config(files, overrides)
    from bench.gpu.cards import CARDS, find_card
    from bench.gpu.estimate import SOURCES, find_source
    from bench.gpu.estimate_tables import estimate, show

    chosen = [find_card(card) for card in cards] or CARDS
    click.echo("Computed, not measured.\n")
    show(estimate(config, [find_source(source) for source in sources] or SOURCES, chosen))


@click.command("bench-scale")
@config_options
@click.option("--cluster", "cluster_file", type=PATH, help="A TOML file that describes a cluster.")
@click.option(
    "--nodes", default="1,2,4,8,16,32", show_default=True, help="Numbers of nodes to project to, separated by commas."
)
@click.option("--repeats", default=5, show_default=True, type=COUNT, help="Number of timed steps for each batch size.")
@output_options
def bench_scale(
    files: Sequence[Path],
    overrides: Sequence[str],
    cluster_file: Path | None,
    nodes: str,
    repeats: int,
    tell: Callable[..., None],
) -> None:
    """Measure the step and the exchanges between the ranks of this run, and project the times to more nodes.

    \b
      python cli.py bench-scale -c configs/demo.toml
      torchrun --nproc-per-node=2 cli.py bench-scale -c configs/demo.toml --cluster launch/cluster.toml

    Without --cluster, the ranks of this run count as one node, and the link between them as the link between nodes.
    """
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", word) for word in nodes.split(",")):
        raise UserError(f"--nodes {nodes}: expected numbers from 1 to 999999 separated by commas, such as 1,2,4")
    config = pretraining_config(files, overrides)
    counts = [int(word) for word in nodes.split(",")]
    from bench.training import scaling
    from train.config.load import load_config

    described = load_config(scaling.Cluster, [cluster_file], []) if cluster_file is not None else None
    measured, world = scaling.measure_scaling(config, repeats=repeats)
    if not world.is_main:
        return
    row = scaling.as_json(measured, scaling.work_of(config), described, counts)
    tell(row, scaling.summary(row), scaling.as_table(row))


@click.command("bench-docs")
@click.option("--results", default="bench/results", show_default=True, type=FOLDER)
@click.option("--docs", default="docs", show_default=True, type=PathOfUser(path_type=Path, exists=True))
def bench_docs(results: Path, docs: Path) -> None:
    """Write the tables of README.md and docs/ and the pictures of docs/results.md from the rows of
    bench/results/."""
    from bench.documentation import write_docs

    click.echo(write_docs(results, docs))

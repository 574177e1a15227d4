"""What `bench/commands.py` runs: measure, print, record, compare."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench import documentation, experiment_report, report, scaling, soak, step_report, tune
from bench import first_batch as start
from bench import step as steps
from bench.frames import large_frames
from bench.loader import Settings
from bench.loader import bench_loader as measure_loader
from errors import UserError
from train.config.load import load_config
from train.config.pretraining import Config
from train.distributed.world import described_world
from train.runs.log import progress_bar
from writing import write_text

_TABLE_WIDTH = 116  # a terminal that is narrower wraps the lines


def bench_loader(
    config: Config,
    cores: int,
    *,
    batch: int,
    repeats: int,
    seconds: float,
    peers: bool,
    large: bool,
    step: bool,
    as_json: bool,
    plot: Path | None,
    record: Path | None,
    compare: str | None,
) -> str | None:
    """Measure and report; a line if our loader is slower than the row to compare with.

    Raises:
        UserError: the data, the settings or the row to compare with cannot be used.
    """
    before = report.find_row(compare) if compare is not None else None
    if large:
        config = dataclasses.replace(config, data=large_frames(config.data))
    settings = Settings(cores, batch, repeats, seconds, peers=peers)
    sources = "large" if large else "small"
    if before is not None:
        report.require_comparable(before, report.conditions(config, settings, sources))
    device = described_world(config.train.device).device
    needed = steps.cached_rate(config, steps.Settings()) if step else None
    with progress_bar("measuring") as progress:
        found = measure_loader(config, settings, device=device, step=needed, progress=progress)
    row = report.as_json(found, config, sources)
    slower = report.regression(before, row) if before is not None else None
    if as_json:
        click.echo(json.dumps(row))
    else:
        for table in report.as_tables(found):
            Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
        click.echo(found.verdict)
    append(record, row)
    if plot is not None:
        report.save_plot(found, plot)
    return slower


def soak_loader(config: Config, cores: int, batch: int, minutes: float, *, as_json: bool, record: Path | None) -> bool:
    """Soak and report; whether the loader held still."""
    settings = Settings(cores, batch)
    with progress_bar("soaking (s)") as progress:
        found = soak.soak(config, settings, minutes * 60, progress)
    row = soak.as_json(found, config, settings)
    click.echo(json.dumps(row) if as_json else soak.verdict(found))
    append(record, row)
    return found.steady


def time_first_batch(config: Config, cores: int, batch: int, *, as_json: bool, record: Path | None) -> None:
    """Time the start of a run's data and report."""
    settings = Settings(cores, batch)
    found = start.first_batch(config, settings)
    row = start.as_json(found, config, settings)
    told = f"index of {found.images} images: {found.index_s:.2f} s; first batch of {batch}: {found.batch_s:.2f} s more"
    click.echo(json.dumps(row) if as_json else told)
    append(record, row)


def tune_loader(config: Config, cores: int, batch: int) -> str:
    """The TOML of what was fastest."""
    with progress_bar("tuning") as progress:
        return tune.as_toml(
            tune.tune(config, Settings(cores, batch), described_world(config.train.device).device, progress)
        )


def bench_train(
    config: Config, precisions: Sequence[str], repeats: int, seconds: float, *, as_json: bool, record: Path | None
) -> None:
    """Measure the training step and report.

    Raises:
        UserError: the data or the device cannot be used.
    """
    settings = steps.Settings(repeats, seconds)
    if not precisions:
        device = described_world(config.train.device).device
        precisions = ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")
    with progress_bar("stepping") as progress:
        found = steps.bench_train(config, precisions, settings, progress)
    row = step_report.as_json(found, config, settings)
    if as_json:
        click.echo(json.dumps(row))
    else:
        Console(width=max(Console().width, _TABLE_WIDTH)).print(step_report.as_table(found))
    append(record, row)


def bench_scale(
    config: Config,
    cluster_file: Path | None,
    nodes: Sequence[int],
    repeats: int,
    *,
    as_json: bool,
    record: Path | None,
) -> None:
    """Measure the ranks at hand, project to more nodes, and report; rank 0 alone speaks.

    Raises:
        UserError: the data, the device or the description of the cluster cannot be used.
    """
    described = load_config(scaling.Cluster, [cluster_file], []) if cluster_file is not None else None
    measured, world = scaling.measure(config, repeats=repeats)
    if not world.is_main:
        return
    work, here = scaling.work_of(config), scaling.this_machine(measured)
    cluster = described or here
    projections = list(dict.fromkeys(scaling.project(work, cluster, count) for count in nodes))  # more have no work
    row = scaling.as_json(measured, work, here, cluster, projections)
    if as_json:
        click.echo(json.dumps(row))
    else:
        console = Console()
        console.print(
            f"measured here, {measured.ranks} ranks: {here.micro_batch_s:.4f} s per micro-batch, {here.fixed_s:.4f} s "
            f"fixed, {measured.step_s:.4f} s per step (the model says {scaling.project(work, here, 1).step_s:.4f} s)"
        )
        if measured.ranks > 1:
            console.print(
                f"sums over the ranks: {here.inside.latency_s * 1e6:.0f} us per hop, "
                f"{here.inside.bytes_per_s / 1e9:.2f} GB/s"
            )
        console.print(scaling.as_table(projections, work, cluster))
    append(record, row)


def draw_history(rows: Path, out: Path) -> str:
    """Draw the rows of a file; what was drawn, for people."""
    return f"{out}: {report.save_history(report.read_rows(rows), out)} rows of {rows}"


def write_docs(results: Path, docs: Path) -> str:
    """Make the pages' tables and the pictures anew; what was done, for people."""
    pages = [docs / name for name in documentation.PAGES]
    for page in pages:
        write_text(page, documentation.write_tables(page.read_text(), results))
    done = [f"{page}: tables from {results}" for page in pages]
    done.append(draw_history(results / "loader.jsonl", docs / "images" / "loader_history.png"))
    claims = documentation.comparisons(results)
    if claims:
        picture = docs / "images" / "experiment_hands.png"
        experiment_report.save_comparisons(claims, picture)
        done.append(f"{picture}: {len(claims)} comparisons")
    return "\n".join(done)


def append(record: Path | None, row: dict[str, Any]) -> None:
    """Add a row to a file, if there is one.

    Raises:
        UserError: it cannot be written; the row is in the message.
    """
    if record is None:
        return
    line = json.dumps(row)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise UserError(f"{record}: cannot be written ({error.strerror}); what was to be recorded: {line}") from error

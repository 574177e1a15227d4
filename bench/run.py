"""What `bench/commands.py` runs: measure, print, record, compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench.loaders import first_batch, report, soak, tune
from bench.loaders.compare import compare_loaders, conditions
from bench.loaders.frames import large_frames
from bench.loaders.ours import LoaderSettings
from bench.rows import tell
from bench.training import report as step_report
from bench.training import scaling, step
from train.config.load import load_config
from train.config.pretraining import Config
from train.distributed.world import described_world
from train.runs.log import progress_bar


def bench_loader(
    config: Config,
    settings: LoaderSettings,
    *,
    large: bool,
    step_too: bool,
    plot: Path | None,
    compare: str | None,
    as_json: bool,
    record: Path | None,
) -> str | None:
    """Measure and report; a line if our loader is slower than the row to compare with.

    Raises:
        UserError: the data, the settings or the row to compare with cannot be used.
    """
    before = report.find_row(compare) if compare is not None else None
    if large:
        config = dataclasses.replace(config, data=large_frames(config.data))
    sources = "large" if large else "small"
    if before is not None:
        report.require_comparable(before, conditions(config, settings, sources))
    device = described_world(config.train.device).device
    needed = step.cached_rate(config, step.StepSettings()) if step_too else None
    with progress_bar("measuring") as progress:
        row = compare_loaders(config, settings, device=device, sources=sources, step=needed, progress=progress)
    tell(row, *report.as_tables(row), row["verdict"], as_json=as_json, record=record)
    if plot is not None:
        report.save_plot(row, plot)
    return report.regression(before, row) if before is not None else None


def soak_loader(
    config: Config, settings: LoaderSettings, minutes: float, *, as_json: bool, record: Path | None
) -> bool:
    """Soak and report; whether the loader held still."""
    with progress_bar("soaking (s)") as progress:
        found = soak.soak(config, settings, minutes * 60, progress)
    tell(soak.as_json(found, config, settings), soak.summary(found), as_json=as_json, record=record)
    return found.steady


def time_first_batch(config: Config, settings: LoaderSettings, *, as_json: bool, record: Path | None) -> None:
    """Time the start of a run's data and report."""
    row = first_batch.first_batch(config, settings)
    tell(row, first_batch.summary(row), as_json=as_json, record=record)


def tune_loader(config: Config, settings: LoaderSettings) -> str:
    """The TOML of what was fastest."""
    with progress_bar("tuning") as progress:
        return tune.as_toml(*tune.tune(config, settings, described_world(config.train.device).device, progress))


def bench_train(
    config: Config, precisions: Sequence[str], settings: step.StepSettings, *, as_json: bool, record: Path | None
) -> None:
    """Measure the training step and report.

    Raises:
        UserError: the data or the device cannot be used.
    """
    if not precisions:
        device = described_world(config.train.device).device
        precisions = ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")
    with progress_bar("stepping") as progress:
        found = step.bench_train(config, precisions, settings, progress)
    row = step_report.as_json(found, config, settings)
    tell(row, step_report.as_table(found), as_json=as_json, record=record)


def bench_scale(
    config: Config, cluster_file: Path | None, nodes: Sequence[int], repeats: int, *, as_json: bool, record: Path | None
) -> None:
    """Measure the ranks at hand, project to more nodes, and report on rank 0.

    Raises:
        UserError: the data, the device or the description of the cluster cannot be used.
    """
    described = load_config(scaling.Cluster, [cluster_file], []) if cluster_file is not None else None
    measured, world = scaling.measure_scaling(config, repeats=repeats)
    if not world.is_main:
        return
    work, here = scaling.work_of(config), scaling.this_machine(measured)
    cluster = described or here
    projections = list(dict.fromkeys(scaling.project(work, cluster, count) for count in nodes))  # more have no work
    row = scaling.as_json(measured, work, here, cluster, projections)
    shown = scaling.summary(measured, work, here), scaling.as_table(projections, work, cluster)
    tell(row, *shown, as_json=as_json, record=record)

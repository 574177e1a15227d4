"""`bench-loader`: our loader beside its ceiling and beside what people use instead, in one run on the same cores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bench.hardware import describe_machine
from bench.measure import Interval, Rate, limited_to_cores, measure_in_rounds
from bench.peers import Peer, installed_peers
from errors import UserError
from pipelines.index import Index
from pipelines.loader import Loader, available_cores
from pipelines.order import RankSlice, build_order
from pipelines.sources import load_index
from train.config import Config, to_dict


@dataclass(frozen=True)
class Settings:
    """How long and on what to measure.

    Attributes:
        cores: that everything is limited to.
        batch: images in a batch.
        repeats: rounds, in each of which every loader is timed once.
        repeat_s: least length of a repeat.
        warmup_s: left out before each repeat, from the first batch on.
    """

    cores: int
    batch: int = 256
    repeats: int = 7
    repeat_s: float = 2.0
    warmup_s: float = 2.0


@dataclass(frozen=True)
class Row:
    """One loader's figures."""

    name: str
    description: str
    views: int
    rate: Rate


def bench_loader(
    config: Config, settings: Settings, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Row]:
    """Measure our loader, as configured, and every peer that is installed, taking turns.

    Raises:
        UserError: the data cannot be used, or has fewer images than a batch.
    """
    index = load_index(config.data)
    check(index, settings)
    paths = [index.path(sample) for sample in range(len(index))]
    _read_all(paths)
    peers = [_our_peer(config, lambda: our_batches(index, config, settings.batch)), *installed_peers()]
    gc.freeze()  # as pretraining does
    with limited_to_cores(settings.cores):
        rates = measure_in_rounds(
            [partial(peer.start, paths, index.box_px, settings.cores, settings.batch) for peer in peers],
            warmup_s=settings.warmup_s,
            repeat_s=settings.repeat_s,
            rounds=settings.repeats,
            progress=progress,
        )
    return [Row(peer.name, peer.description, peer.views, rate) for peer, rate in zip(peers, rates, strict=True)]


def as_table(rows: list[Row], settings: Settings) -> Table:
    """Rates and ratios, each with its 95 % interval."""
    ours = rows[0].rate
    table = Table(title=f"{settings.cores} cores, batches of {settings.batch}, {settings.repeats} rounds")
    table.add_column("loader")
    for title in ("source images/s", "95 % interval", "views/s", "CPU ms/image", "cores busy", "memory", "ours is"):
        table.add_column(title, justify="right")
    for row in rows:
        low, high = row.rate.interval
        table.add_row(
            row.name,
            f"{row.rate.mean:.0f}",
            f"{low:.0f} to {high:.0f}",
            f"{row.rate.mean * row.views:.0f}" if row.views else "-",
            f"{row.rate.cpu_s_per_image * 1e3:.2f}",
            f"{row.rate.cores_busy:.2f}",
            f"{row.rate.memory_mib:.0f} MiB",
            _times(ours.over(row.rate)) if row.rate is not ours else "1",
        )
    return table


def as_json(rows: list[Row], config: Config, settings: Settings) -> dict[str, Any]:
    """Everything that a row of bench/results/ holds."""
    tables = to_dict(config)
    return {
        "bench": "loader",
        "machine": describe_machine(),
        "settings": {name: getattr(settings, name) for name in ("cores", "batch", "repeats", "repeat_s", "warmup_s")},
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "loaders": [
            {
                "name": row.name,
                "images_per_s": round(row.rate.mean, 1),
                "interval": [round(edge, 1) for edge in row.rate.interval],
                "repeats": [round(rate, 1) for rate in row.rate.images_per_s],
                "views_per_s": round(row.rate.mean * row.views, 1),
                "cpu_ms_per_image": round(row.rate.cpu_s_per_image * 1e3, 3),
                "cores_busy": round(row.rate.cores_busy, 2),
                "memory_mib": round(row.rate.memory_mib),
                "images": row.rate.images,
                "ours_is": [round(edge, 3) for edge in astuple(rows[0].rate.over(row.rate))],
            }
            for row in rows
        ],
    }


def _times(ratio: Interval) -> str:
    return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) x"


def _our_peer(config: Config, start: Any) -> Peer:
    return Peer(f"this loader ({config.pipelines.backend})", "", 2, lambda paths, boxes, threads, batch: start())


def check(index: Index, settings: Settings) -> None:
    """Whether the settings fit the data and the machine.

    Raises:
        UserError: the data has fewer images than a batch, or there are not that many cores.
    """
    if len(index) < settings.batch:
        raise UserError(f"{index.root} has {len(index)} images, fewer than a batch of {settings.batch}")
    if settings.cores > available_cores():
        raise UserError(f"--cores {settings.cores}: this process may use {available_cores()}")


def our_batches(index: Index, config: Config, batch: int) -> Generator[int]:
    """Endless sizes of batches of our loader, as configured; closing it closes the loader."""
    with Loader(
        index,
        build_order(index, batch=batch, seed=config.run.seed),
        RankSlice(batch, 0, batch),
        config.pipelines,
        config.geometry,
        config.colour,
        seed=config.run.seed,
        device=torch.device("cpu"),
        appearance=config.appearance,
    ) as loader:
        for made in loader:
            yield len(made)


def _read_all(paths: list[Path]) -> None:
    """Bring the files into the page cache, for all alike."""
    for path in paths:
        np.fromfile(path, np.uint8)

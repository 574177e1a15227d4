"""Our loader, its parts and other loaders, measured in one run on the same cores."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.table import Table

from peclr_dali.bench.loaders.parts import parts_of_loader
from peclr_dali.bench.loaders.peers import installed_peers
from peclr_dali.bench.measure import Progress, Rate, Rounds, Start, measure_in_rounds
from peclr_dali.bench.our_loader import our_batches
from peclr_dali.bench.rows import Row, as_table, describe_machine
from peclr_dali.errors import UserError
from peclr_dali.machine.cores import available_cores
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import to_dict

log = logging.getLogger(__name__)

OURS: Final = "this loader"

_BUSY: Final = 0.8
"""Share of busy cores from which the processor counts as the limit."""

_REMEDY: Final = {
    "reading": "fewer and larger files (packed shards), or a local disk",
    "decoding": "smaller source images, more cores, or a GPU that decodes",
    "making views": "more cores, or a GPU that makes the views",
}


def compare_loaders(
    config: Config,
    rounds: Rounds,
    *,
    batch: int,
    peers: bool,
    device: torch.device,
    sources: str = "small",
    progress: Progress,
) -> dict[str, Any]:
    """Measure our loader as configured, its parts, and every installed peer in rounds.

    Args:
        config: configuration of pre-training; the data has at least as many images as a batch.
        rounds: how long to measure.
        batch: images in a batch.
        peers: whether to measure other loaders too.
        device: device of our loader's batches.
        sources: "small" or "large" images, for the row.
        progress: called after each repeat.

    Returns:
        A row of bench/results/. "loaders" begins with ours; "stages" are its parts, each alone.

    Raises:
        UserError: an image cannot be used.
    """
    index, cores = load_index(config.data), available_cores()
    paths = [] if index.store is not None else [index.path(sample) for sample in range(len(index))]
    if not paths:
        log.info("packed data: other loaders are left out, since they need single files")
    require_sound(paths)  # reading also fills the page cache, for all loaders alike

    ours = partial(our_batches, index, config, batch, device)
    loaders: dict[str, tuple[str, Start]] = {OURS: ("as configured", ours)}
    for name, peer in installed_peers().items() if peers and paths else ():
        loaders[name] = peer.description, partial(peer.start, paths, index.box_px, cores, batch)
    everything = loaders | parts_of_loader(index, config, batch, device)
    gc.freeze()  # as pre-training does
    rates = measure_in_rounds([start for _, start in everything.values()], rounds, progress)
    entries = [
        {"name": name, "description": description, **_figures(rate, rates[0])}
        for (name, (description, _)), rate in zip(everything.items(), rates, strict=True)
    ]
    tables = to_dict(config)
    row = {
        "bench": "loader",
        "machine": describe_machine(),
        "settings": {**asdict(rounds), "batch": batch},
        "sources": sources,
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "device": str(device),
        "images_per_row": 1 if index.partners is None else 2,
        "loaders": entries[: len(loaders)],
        "stages": entries[len(loaders) :],
    }
    return row | {"verdict": verdict(row)}


def verdict(row: Row) -> str:
    """What limits the loader, from a row of `bench-loader`: the processor, and what it does most, or waiting."""
    ours = row["loaders"][0]
    cores = row["settings"].get("cores", row["machine"]["cores"])
    made, busy = f"The loader makes {ours['images_per_s']:.0f} images/s", ours["cores_busy"] / cores
    if row.get("images_per_row") == 2:
        made += f", which is {ours['images_per_s'] / 2:.0f} pairs/s"
    if busy < _BUSY:
        slowest = min(row["stages"], key=lambda one: float(one["images_per_s"]))
        return (
            f"{made}; no core limits it ({busy:.0%} of {cores} busy) but waiting; the part '{slowest['name']}' alone "
            f"makes {slowest['images_per_s']:.0f}: raise pipelines.threads, pipelines.prefetch or pipelines.batch."
        )
    parts_ms = {one["name"]: float(one["cpu_ms_per_image"]) for one in row["stages"]}
    read_ms, decode_ms = parts_ms["read only"], parts_ms["decode only"]
    views_ms = max(ours["cpu_ms_per_image"] - read_ms - decode_ms, 0.0)
    costs = {"reading": read_ms, "decoding": decode_ms, "making views": views_ms}
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{made}; the processor limits it ({busy:.0%} of {cores} cores busy), and {most} takes "
        f"{costs[most] / sum(costs.values()):.0%} of its time: change to {_REMEDY[most]}."
    )


def require_sound(paths: Sequence[Path]) -> None:
    """Read and check every file, since other loaders stop at a bad one. A bad file is a `UserError`."""
    for path in paths:
        try:
            check_image(np.fromfile(path, np.uint8))
        except (OSError, BadImage) as error:
            raise UserError(
                f"{path}: cannot be used ({getattr(error, 'strerror', None) or error}). List such files with 'python "
                "cli.py check-data' and leave them out with --set data.bad_list=..."
            ) from error


def as_tables(row: Row) -> Iterator[Table | str]:
    """For the terminal: loaders with their ratios and 95 % intervals, the parts of our loader, what each does."""
    heads = ("", "images/s", "95 % interval", "CPU ms/image", "cores busy", "this loader is")
    what = f"{row['machine']['cores']} cores, batches of {row['settings']['batch']} on {row['device']}"
    yield as_table(f"{what}, {row['settings']['repeats']} rounds", heads, map(_line, row["loaders"]))
    yield as_table("parts of this loader, each alone", heads, map(_line, row["stages"]))
    yield "\n".join(f"{one['name']}: {one['description']}" for one in (*row["loaders"], *row["stages"]))


def _line(entry: Row) -> tuple[str, ...]:
    low, high = entry["interval"]
    return (
        entry["name"],
        f"{entry['images_per_s']:.0f}",
        f"{low:.0f} to {high:.0f}",
        f"{entry['cpu_ms_per_image']:.3f}",
        f"{entry['cores_busy']:.2f}",
        "{:.2f} x ({:.2f} to {:.2f})".format(*entry["ours_is"]),
    )


def _figures(rate: Rate, ours: Rate) -> dict[str, Any]:
    return {
        "images_per_s": round(rate.mean, 1),
        "interval": [round(edge, 1) for edge in rate.interval],
        "repeats": [round(value, 1) for value in rate.images_per_s],
        "cpu_ms_per_image": round(rate.cpu_s_per_image * 1e3, 3),
        "cores_busy": round(rate.cores_busy, 2),
        "images": rate.images,
        "ours_is": [round(edge, 3) for edge in ours.over(rate)],
    }

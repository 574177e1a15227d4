"""Our loader, its parts and other loaders, measured in one run on the same cores."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from rich.table import Table

from peclr_dali.bench.loaders.parts import DECODE, READ, parts_of_loader
from peclr_dali.bench.loaders.peers import offered_peers
from peclr_dali.bench.loaders.peers.paper_views import Files
from peclr_dali.bench.measure import Progress, Rounds, Start, measure_in_rounds
from peclr_dali.bench.our_loader import make_endless_loader, name_of, our_batches, where_pixels_are_made
from peclr_dali.bench.rows import Row, as_table, describe_machine
from peclr_dali.errors import UserError
from peclr_dali.machine.cores import available_cores
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.exif import upright_size_px
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import to_dict

log = logging.getLogger(__name__)

OURS: Final = "this loader"

_BUSY: Final = 0.8
"""Share of busy cores from which the processor counts as the limit."""

_REMEDY: Final = {
    "reading": "fewer and larger files (packed shards), or a local disk",
    "decoding": "smaller source images, more cores, or another pipelines.decoder",
    "making views": "more cores, or another pipelines.views",
}


def compare_loaders(
    config: Config, rounds: Rounds, *, batch: int, peers: bool, device: torch.device, large: bool, progress: Progress
) -> dict[str, Any]:
    """Measure our loader as configured, its parts, and every peer that can run here, in rounds.

    Args:
        batch: images in a batch; the data has as many or more.
        peers: whether to measure other loaders too.
        device: device of our loader's batches; peers on a GPU use the current one.
        large: whether the data are the frames of `frames.py`, for the row.

    Returns:
        A row of bench/results/. "loaders" begins with ours; "stages" are its parts, each alone.

    Raises:
        UserError: an image cannot be used.
    """
    index = load_index(config.data)
    make_loader = partial(make_endless_loader, index, config, batch, device)
    with make_loader() as loader:
        where = where_pixels_are_made(loader.settings)
    ours = f"as configured; decoder: {where['decoder']}, views: {where['views']}"
    loaders: dict[str, tuple[str, Start]] = {OURS: (ours, partial(our_batches, index, config, batch, device))}
    if index.store is not None:
        log.info("packed data: other loaders are left out, since they need single files")
    else:
        files, only_jpegs = checked_files(index)  # reading also fills the page cache, for all loaders alike
        for name, peer in offered_peers(device, only_jpegs=only_jpegs).items() if peers else ():
            loaders[name] = peer.description, partial(peer.start, files, available_cores(), batch)
    everything = loaders | parts_of_loader(make_loader, len(index))
    gc.freeze()  # as pre-training does
    rates = measure_in_rounds([start for _, start in everything.values()], rounds, progress)
    entries = [
        {"name": name, "description": what, **rate.as_row(), "ours_is": [round(x, 3) for x in rates[0].over(rate)]}
        for (name, (what, _)), rate in zip(everything.items(), rates, strict=True)
    ]
    tables = to_dict(config)
    row = {
        "bench": "loader",
        "machine": describe_machine(),
        "settings": {**asdict(rounds), "batch": batch},
        "sources": "large" if large else "small",
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "device": str(device),
        "card": name_of(device),
        **where,
        "images_per_row": 1 if index.partners is None else 2,
        "loaders": entries[: len(loaders)],
        "stages": entries[len(loaders) :],
    }
    return row | {"verdict": verdict(row)}


def checked_files(index: Index) -> tuple[Files, bool]:
    """Read and check every file, since other loaders stop at a bad one; and whether all files are JPEGs.

    Raises:
        UserError: a file cannot be used.
    """
    paths = [index.path(sample) for sample in range(len(index))]
    stored_px, orientations, only_jpegs = [], [], True
    for path in paths:
        try:
            image = check_image(np.fromfile(path, np.uint8))
        except (OSError, BadImage) as error:
            raise UserError(
                f"{path}: cannot be used ({getattr(error, 'strerror', None) or error}). List such files with 'python "
                "cli.py check-data' and leave them out with --set data.bad_list=..."
            ) from error
        stored_px.append(image.size_px)
        orientations.append(image.orientation)
        only_jpegs &= image.is_jpeg
    height_px, width_px = upright_size_px(np.array(stored_px), np.array(orientations)).T
    whole_px = np.stack([width_px / 2, height_px / 2, np.maximum(width_px, height_px)], axis=1)
    boxes_px = np.where(index.box_px[:, 2:] == 0, whole_px, index.box_px).astype(np.float32)
    return Files([str(path) for path in paths], boxes_px), only_jpegs


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
    views_ms = max(ours["cpu_ms_per_image"] - parts_ms[READ] - parts_ms[DECODE], 0.0)
    costs = {"reading": parts_ms[READ], "decoding": parts_ms[DECODE], "making views": views_ms}
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{made}; the processor limits it ({busy:.0%} of {cores} cores busy), and {most} takes "
        f"{costs[most] / sum(costs.values()):.0%} of its time: change to {_REMEDY[most]}."
    )


def as_tables(row: Row) -> Iterator[Table | str]:
    """For the terminal: loaders with their ratios and 95 % intervals, the parts of our loader, what each does."""
    heads = ("", "images/s", "95 % interval", "CPU ms/image", "cores busy", "this loader is")
    what = f"{row['machine']['cores']} cores, batches of {row['settings']['batch']} on {row['device']}"
    yield as_table(f"{what}, {row['settings']['repeats']} rounds", heads, map(_line, row["loaders"]))
    yield as_table("parts of this loader, each alone", heads, map(_line, row["stages"]))
    yield "\n".join(f"{one['name']}: {one['description']}" for one in (*row["loaders"], *row["stages"]))
    yield row["verdict"]


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

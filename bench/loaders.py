"""Our loader, its parts and other loaders, measured in one run on the same cores."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from peclr_dali.bench.measure import Progress, Rounds, Start, measure_in_rounds
from peclr_dali.bench.our_loader import decode_only, make_endless_loader, our_batches, read_only
from peclr_dali.bench.peers import offered_peers
from peclr_dali.bench.peers.paper_views import Files
from peclr_dali.bench.rows import Row, describe_machine
from peclr_dali.errors import UserError
from peclr_dali.machine.cores import available_cores
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.exif import upright_size_px
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import to_dict

log = logging.getLogger(__name__)

_BUSY: Final = 0.8
"""Share of busy cores from which the processor counts as the limit."""

_REMEDY: Final = {
    "reading": "fewer and larger files (packed shards), or a local disk",
    "decoding": "smaller source images, more cores, or another pipelines.decoder",
    "making views": "more cores, or another pipelines.views",
}


def compare_loaders(
    config: Config, index: Index, rounds: Rounds, *, batch: int, peers: bool, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Measure our loader as configured, its parts, and every peer that can run here, in rounds.

    Args:
        config: what configures our loader.
        index: the configured images, a batch of them or more.
        batch: images in a batch.
        peers: whether to measure other loaders too.
        device: device of our loader's batches; peers on a GPU use the current one.

    Returns:
        A row of bench/results/. "loaders" begins with ours; "stages" are its parts, each alone.

    Raises:
        UserError: an image cannot be used.
    """
    make_loader = partial(make_endless_loader, index, config, batch, device)
    with make_loader() as loader:
        settings = loader.settings
    starts: dict[str, Start] = {"this loader": partial(our_batches, index, config, batch, device)}
    if index.store is not None:
        log.info("packed data: other loaders are left out, since they need single files")
    else:
        files, only_jpegs = checked_files(index)  # reading also fills the page cache, for all loaders alike
        for name, peer in offered_peers(device, only_jpegs=only_jpegs).items() if peers else ():
            starts[name] = partial(peer.start, files, available_cores(), batch)
    loaders = len(starts)
    starts["read only"] = partial(read_only, make_loader)
    starts["decode only"] = partial(decode_only, make_loader, min(len(index), 512))  # a fair sample of mixed sizes
    gc.freeze()  # as pre-training does
    rates = measure_in_rounds([*starts.values()], rounds, progress)
    entries = [
        {"name": name, **rate.as_row(), "ours_is": [round(x, 3) for x in rates[0].over(rate)]}
        for name, rate in zip(starts, rates, strict=True)
    ]
    machine, tables = describe_machine(), to_dict(config)
    row = {
        "bench": "loader",
        "machine": machine,
        "settings": {**asdict(rounds), "batch": batch},
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "device": str(device),
        "card": machine["gpu"] if device.type == "cuda" else "none",
        "decoder": settings.decoder,
        "views": settings.views,
        "images_per_row": 1 if index.partners is None else 2,
        "loaders": entries[:loaders],
        "stages": entries[loaders:],
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
    ours, (read, decode), cores = row["loaders"][0], row["stages"], row["machine"]["cores"]
    made, busy = f"The loader makes {ours['images_per_s']:.0f} images/s", ours["cores_busy"] / cores
    if row.get("images_per_row") == 2:
        made += f", which is {ours['images_per_s'] / 2:.0f} pairs/s"
    if busy < _BUSY:
        slowest = min(read, decode, key=lambda one: float(one["images_per_s"]))
        return (
            f"{made}; no core limits it ({busy:.0%} of {cores} busy) but waiting; the part '{slowest['name']}' alone "
            f"makes {slowest['images_per_s']:.0f}: raise pipelines.threads, pipelines.prefetch or pipelines.batch."
        )
    read_ms, decode_ms, ours_ms = (float(one["cpu_ms_per_image"]) for one in (read, decode, ours))
    costs = {"reading": read_ms, "decoding": decode_ms, "making views": max(ours_ms - read_ms - decode_ms, 0.0)}
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{made}; the processor limits it ({busy:.0%} of {cores} cores busy), and {most} takes "
        f"{costs[most] / sum(costs.values()):.0%} of its time: change to {_REMEDY[most]}."
    )

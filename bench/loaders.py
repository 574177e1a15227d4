"""Our loader, its parts and other loaders, measured in one run on the same cores."""

import gc
import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from peclr_dali.bench.measure import Progress, Rounds, Start, measure_in_rounds
from peclr_dali.bench.peers import dali_plain, opencv
from peclr_dali.bench.peers.workers import Files, in_workers
from peclr_dali.bench.rows import Row, describe_machine, markdown
from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.runner import run_chunks
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule, build_order
from peclr_dali.pipelines.views.plan import Chunk
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.config.pretraining import Config

log = logging.getLogger(__name__)

PEERS: dict[str, Callable[[Files, int, int], Iterable[Any]]] = {
    "OpenCV + DataLoader": partial(in_workers, opencv.make_batch_as_authors),
    "OpenCV + DataLoader, tuned": partial(in_workers, opencv.make_batch),
    "DALI, plain": dali_plain.batches,
}
"""Functions of files, threads or processes, and images in a batch, which make batches without end."""


@dataclass(frozen=True)
class OurLoader:
    """Our loader as configured, and its parts, for one rank; none of them ends.

    Attributes:
        index: images, a batch or more.
        batch: images in a batch.
        device: where its batches are.
    """

    index: Index
    config: Config
    batch: int
    device: torch.device

    def open(self) -> Loader:
        """A new loader, which does not end."""
        order = build_order(self.index, batch=self.batch, seed=self.config.run.seed)
        schedule = Schedule(order, self.batch, range(self.batch))
        return build_loader(self.index, schedule, self.config.pipelines, self.config.augmentation, device=self.device)

    def batches(self) -> Generator[int]:
        """Load batches and yield their numbers of images."""
        with self.open() as loader:
            for made in loader:
                if self.device.type == "cuda":
                    made.to(self.device)
                    torch.cuda.current_stream(self.device).synchronize()  # a batch counts when it has arrived
                yield loader.settings.images_per_row * len(made)

    def read_only(self) -> Generator[int]:
        """Read files from the page cache, check and queue them with all reader threads, and plan the views."""
        with self.open() as loader:
            for chunk in loader.planned():
                yield len(chunk.files)

    def decode_only(self) -> Generator[int]:
        """Run the decoder's pipeline on bytes in memory, again and again on the same chunks, eight or more.

        As in the loader, only the regions of large images are decoded that the views reach.
        """
        with self.open() as loader:
            kept: list[Chunk] = []
            for chunk in loader.planned():
                kept.append(chunk)
                if len(kept) >= 8 and sum(len(chunk.files) for chunk in kept) >= min(
                    len(self.index), 512
                ):  # mixed sizes
                    break
            for chunk, _ in run_chunks(partial(decode_pipeline, loader.settings), cycle(kept)):
                yield len(chunk.files)


def compare_loaders(ours: OurLoader, rounds: Rounds, *, peers: bool, progress: Progress) -> dict[str, Any]:
    """Measure our loader, its parts, and every peer that can run here, in rounds.

    Returns:
        A row of bench/results/. "loaders" begins with ours; "stages" are its parts, each alone.

    Raises:
        UserError: an image cannot be used.
    """
    index, config, batch = ours.index, ours.config, ours.batch
    with ours.open() as loader:
        settings = loader.settings
    starts: dict[str, Start] = {"this loader": ours.batches}
    if index.store is not None:
        log.info("packed data: other loaders are left out, since they need single files")
    else:
        files = checked_files(index, config.geometry.side_px)  # it also fills the page cache, for all loaders alike
        if peers:
            starts |= {name: partial(peer_images, name, files, batch) for name in PEERS}
    loaders = len(starts)
    starts |= {"read only": ours.read_only, "decode only": ours.decode_only}
    gc.freeze()  # as pre-training does
    rates = measure_in_rounds([*starts.values()], rounds, progress)
    entries = [
        {"name": name, **rate.as_row(), "ours_is": [round(ratio, 3) for ratio in rates[0].over(rate)]}
        for name, rate in zip(starts, rates, strict=True)
    ]
    machine, tables = describe_machine(), to_dict(config)
    row = {
        "bench": "loader",
        "machine": machine,
        "settings": {**asdict(rounds), "batch": batch},
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "device": str(ours.device),
        "card": machine["gpu"] if ours.device.type == "cuda" else "none",
        "decoder": settings.decoder,
        "views": settings.views,
        "images_per_row": 1 if index.partners is None else 2,
        "loaders": entries[:loaders],
        "stages": entries[loaders:],
    }
    return row | {"verdict": verdict(row)}


def peer_images(name: str, files: Files, batch: int) -> Generator[int]:
    """Load a peer's batches without end and yield their numbers of images."""
    for first_views, *_ in PEERS[name](files, available_cores(), batch):
        yield len(first_views)


def checked_files(index: Index, side_px: int) -> Files:
    """All files with their boxes, checked, since other loaders stop at a bad one.

    Raises:
        UserError: a file cannot be used.
    """
    paths = [str(index.path(sample)) for sample in range(len(index))]
    height_px, width_px = image_sizes_px(data for row in range(len(index)) for data in index.read_many([row])).T
    if (bad := np.flatnonzero(height_px == 0)).size:
        raise UserError(
            f"{paths[bad[0]]}: cannot be used. List such files with 'python cli.py check-data' and leave them out with "
            "--set data.bad_list=..."
        )
    whole_px = np.stack([width_px / 2, height_px / 2, np.maximum(width_px, height_px)], axis=1)
    return Files(paths, np.where(index.box_px[:, 2:] == 0, whole_px, index.box_px).astype(np.float32), side_px)


def table_of(row: Row) -> str:
    """Rates of all loaders and parts, and how many times as fast ours is; intervals of 95 %."""
    heads = ["", "images/s (95 %)", "CPU ms/image", "cores busy", "this loader is (95 %)"]
    lines = [
        [
            loader["name"],
            "{:.0f} ({:.0f} to {:.0f})".format(loader["images_per_s"], *loader["interval"]),
            f"{loader['cpu_ms_per_image']:.3f}",
            f"{loader['cores_busy']:.2f}",
            "{:.2f} x ({:.2f} to {:.2f})".format(*loader["ours_is"]),
        ]
        for loader in (*row["loaders"], *row["stages"])
    ]
    return markdown(heads, lines)


def verdict(row: Row) -> str:
    """What limits the loader, and what the processor's time goes to, from a row of `bench-loader`."""
    ours, (read, decode), cores = row["loaders"][0], row["stages"], row["machine"]["cores"]
    read_ms, decode_ms, ours_ms = (float(stage["cpu_ms_per_image"]) for stage in (read, decode, ours))
    costs = {"reading": read_ms, "decoding": decode_ms, "making views": max(ours_ms - read_ms - decode_ms, 0.0)}
    shares = ", ".join(f"{name} {cost / sum(costs.values()):.0%}" for name, cost in costs.items())
    busy = ours["cores_busy"] / cores
    limit = "the processor limits it" if busy >= 0.8 else "the processor does not limit it"
    return f"{busy:.0%} of {cores} cores are busy, so {limit}. The processor's time: {shares}."

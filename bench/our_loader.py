"""Our loader as the benchmarks run it: whole, and each alone its parts that come before the views."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import cycle

import torch

from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.runner import run_chunks
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order
from peclr_dali.train.config.pretraining import Config


def make_endless_loader(index: Index, config: Config, batch: int, device: torch.device) -> Loader:
    """Our loader as configured, for one rank. It does not end."""
    schedule = Schedule(build_order(index, batch=batch, seed=config.run.seed), RankSlice(batch, 0, batch))
    return Loader(index, schedule, config.pipelines, config.augmentation, device=device)


def our_batches(index: Index, config: Config, batch: int, device: torch.device) -> Generator[int]:
    """Load batches without end and yield their numbers of images. Closing the generator closes the loader."""
    with make_endless_loader(index, config, batch, device) as loader:
        for made in loader:
            if device.type == "cuda":
                made.to(device)
                torch.cuda.current_stream(device).synchronize()  # a batch counts when it has arrived
            yield loader.images * len(made)


def read_only(make_loader: Callable[[], Loader]) -> Generator[int]:
    """Read files from the page cache, check and queue them with all reader threads, and plan the views."""
    with make_loader() as loader:
        for chunk in loader.chunks():
            yield len(chunk.files)


def decode_only(make_loader: Callable[[], Loader], files: int) -> Generator[int]:
    """Run the decoder's pipeline on bytes in memory: again and again on eight chunks or more, with so many files.

    As in the loader, only the regions of large images are decoded that the views reach.
    """
    with make_loader() as loader:
        kept: list[Chunk] = []
        for chunk in loader.chunks():
            kept.append(chunk)
            if len(kept) >= 8 and sum(len(one.files) for one in kept) >= files:
                break
        for chunk, _ in run_chunks(partial(decode_pipeline, loader.settings), cycle(kept)):
            yield len(chunk.files)

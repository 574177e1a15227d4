"""The parts of our loader that come before the views, each measured alone, to find what limits the loader.

Each part comes from a loader as configured. The views take the rest of the loader's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from itertools import cycle, islice
from typing import Final

import torch

from bench.measure import Start
from bench.our_loader import make_endless_loader
from pipelines.loader import Loader
from pipelines.render.dali_graph import decode_pipeline
from pipelines.render.runner import Runner
from pipelines.request_maker import Chunk
from pipelines.samples.index import Index
from train.config.pretraining import Config

_CHUNKS_KEPT: Final = 8
_FILES_KEPT: Final = 512
"""Files that the decoder repeats: enough for a fair sample of files of mixed sizes."""


def parts_of_loader(index: Index, config: Config, batch: int, device: torch.device) -> dict[str, tuple[str, Start]]:
    """Name of each part -> what it does, and a function that makes an endless iterator over numbers of images done."""

    def endless(run: Callable[[Loader], Generator[int]]) -> Start:
        def start() -> Generator[int]:
            with make_endless_loader(index, config, batch, device) as loader:
                yield from run(loader)

        return start

    with make_endless_loader(index, config, batch, device) as loader:
        graph = loader.graph
    regions = "of large ones only the regions that the views reach" if graph.regions else "whole"
    what = f"bytes in memory to decoded images, {regions}, as the loader does here"
    return {
        "read only": ("files read from the page cache, checked and queued; views planned", endless(_read)),
        "decode only": (what, endless(_decode)),
    }


def encoded_chunks(loader: Loader) -> list[Chunk]:
    """Requests with their files in memory, of enough images to represent the dataset."""
    chunks: list[Chunk] = []
    wanted = min(len(loader.request_maker.index), _FILES_KEPT)
    for positions in loader.pieces():
        chunks.append(loader.request_maker.chunk(positions))
        if len(chunks) >= _CHUNKS_KEPT and sum(len(chunk.positions) for chunk in chunks) >= wanted:
            break
    return chunks


def _read(loader: Loader) -> Generator[int]:
    """Read requests, with all reader threads."""
    pieces = loader.pieces()
    waiting = deque(loader.request_maker.start(positions) for positions in islice(pieces, loader.graph.threads))
    while True:
        chunk = waiting.popleft().result()
        waiting.extend(loader.request_maker.start(positions) for positions in islice(pieces, 1))
        yield len(chunk.positions)


def _decode(loader: Loader) -> Generator[int]:
    """Run the decoder's pipeline on bytes in memory."""
    requests = cycle([chunk.request for chunk in encoded_chunks(loader)])
    runner = Runner(lambda source: decode_pipeline(loader.graph, source), requests.__next__)
    while True:
        yield len(next(runner)[0])

"""The parts of our loader that come before the views, each measured alone, to find what limits the loader.

Each part comes from a loader as configured. The views take the rest of the loader's time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import cycle
from typing import Final

import torch

from peclr_dali.bench.measure import Start
from peclr_dali.bench.our_loader import make_endless_loader
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.runner import run_chunks
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.pretraining import Config

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
        in_regions = loader.settings.regions
    regions = "of large ones only the regions that the views reach" if in_regions else "whole"
    what = f"bytes in memory to decoded images, {regions}, as the loader does here"
    return {
        "read only": ("files read from the page cache, checked and queued; views planned", endless(_read)),
        "decode only": (what, endless(partial(_decode, images=min(len(index), _FILES_KEPT)))),
    }


def first_chunks(loader: Loader, images: int) -> list[Chunk]:
    """Chunks with their files in memory, of enough images to represent the dataset."""
    chunks: list[Chunk] = []
    for chunk in loader.chunks():
        chunks.append(chunk)
        if len(chunks) >= _CHUNKS_KEPT and loader.images * sum(map(len, chunks)) >= images:
            break
    return chunks


def _read(loader: Loader) -> Generator[int]:
    """Read and plan chunks, with all reader threads."""
    for chunk in loader.chunks():
        yield loader.images * len(chunk)


def _decode(loader: Loader, images: int) -> Generator[int]:
    """Run the decoder's pipeline on bytes in memory."""
    chunks = cycle(image for chunk in first_chunks(loader, images) for image in chunk.images)
    for chunk, _ in run_chunks(partial(decode_pipeline, loader.settings), chunks):
        yield len(chunk)

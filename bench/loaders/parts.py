"""The parts of our loader that come before the views, each measured alone. The views take the rest of its time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import cycle

from peclr_dali.bench.measure import Start
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.runner import run_chunks

READ, DECODE = "read only", "decode only"


def parts_of_loader(make_loader: Callable[[], Loader], files: int) -> dict[str, tuple[str, Start]]:
    """Name of each part -> what it does, and a function that makes an endless iterator over numbers of images done.

    Args:
        make_loader: makes the loader as configured, which does not end.
        files: number of files in the dataset.
    """
    with make_loader() as loader:
        regions = "of large ones only the regions that the views reach" if loader.settings.regions else "whole"
    what = f"bytes in memory to decoded images, {regions}, as the loader does here"
    return {
        READ: ("files read from the page cache, checked and queued; views planned", partial(_read, make_loader)),
        DECODE: (what, partial(_decode, make_loader, min(files, 512))),  # a fair sample of files of mixed sizes
    }


def _read(make_loader: Callable[[], Loader]) -> Generator[int]:
    """Read and plan chunks, with all reader threads."""
    with make_loader() as loader:
        for chunk in loader.chunks():
            yield len(chunk.files)


def _decode(make_loader: Callable[[], Loader], files: int) -> Generator[int]:
    """Run the decoder's pipeline on bytes in memory: again and again on eight chunks or more, with so many files."""
    with make_loader() as loader:
        kept: list[Chunk] = []
        for chunk in loader.chunks():
            kept.append(chunk)
            if len(kept) >= 8 and sum(len(one.files) for one in kept) >= files:
                break
        for chunk, _ in run_chunks(partial(decode_pipeline, loader.settings), cycle(kept)):
            yield len(chunk.files)

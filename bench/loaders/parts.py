"""The parts of our loader, each measured alone, to find the one that limits it.

Each part comes from a loader as configured. Its input is the output of the part before it, held in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Final

import torch

from bench.loaders.ours import make_endless_loader
from bench.measure import Start
from pipelines.loader import Loader
from pipelines.render.dali_graph import decode_pipeline
from pipelines.render.runner import Outputs, Runner
from pipelines.request_maker import Chunk
from pipelines.samples.index import Index
from pipelines.views.augmentation import AppearanceConfig, ColourConfig
from train.config.pretraining import Config

_CHUNKS_KEPT: Final = 8
_FILES_KEPT: Final = 512
"""Files that the decoder repeats: enough for a fair sample of files of mixed sizes."""

_ENGINE_LOADS: Final = (0.0, 0.5, 0.8, 1.0)
"""Shares of the images that go to a GPU's JPEG engines."""


@dataclass(frozen=True)
class LoaderPart:
    """A part of the loader, or a whole loader, to be measured.

    Attributes:
        name: short name, for a table.
        description: what it does.
        start: makes an endless iterator over numbers of images done.
        views: number of views that it makes from an image.
        as_configured: False for a part with another setting than the configured one.
    """

    name: str
    description: str
    start: Start
    views: int = 0
    as_configured: bool = True


def parts_of_loader(index: Index, config: Config, batch: int, device: torch.device) -> list[LoaderPart]:
    """All parts of a loader as configured."""

    def part(
        name: str, description: str, run: Callable[[Loader], Generator[int]], config: Config = config
    ) -> LoaderPart:
        def start() -> Generator[int]:
            with make_endless_loader(index, config, batch, device) as loader:
                yield from run(loader)

        return LoaderPart(name, description, start)

    with make_endless_loader(index, config, batch, device) as loader:
        backend, graph = loader.backend, loader.graph
    plain = replace(config, colour=ColourConfig(jitter="none"), appearance=AppearanceConfig())
    regions = "of large ones only the regions that the views reach" if graph.regions else "whole"
    what = f"bytes in memory to decoded images, {regions}, as the loader does here"
    found = [part("read only", "files read from the page cache, checked and queued; views planned", _read)]
    if not graph.pixels:
        found.append(part("decode only", what, _decode))
    for load in _ENGINE_LOADS if graph.device == "gpu" and not graph.pixels else ():
        loaded = replace(config, pipelines=replace(config.pipelines, hw_decoder_load=load))
        one = part(f"decode only, {load:.0%} on engines", f"hw_decoder_load = {load}", _decode, loaded)
        found.append(replace(one, as_configured=False))
    if backend == "opencv" or graph.fused:
        found += [
            part("geometry only", "decoded images to both views, without colour jitter", _views, plain),
            part("views only", "decoded images to both views, with colour jitter", _views),
        ]
    if backend == "dali":
        found += [
            part("decode + geometry", "bytes in memory to both views, without colour jitter", _graph, plain),
            part("decode + views", "bytes in memory to both views, with colour jitter", _graph),
        ]
    what = "finished views copied into a batch and moved to the device"
    return [*found, part("hand-over only", what, partial(_hand_over, device=device))]


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


def _graph(loader: Loader) -> Generator[int]:
    """Decode and make the views, from bytes in memory."""
    chunks = encoded_chunks(loader)
    runner = Runner(loader.renderer.build, cycle([chunk.request for chunk in chunks]).__next__)
    return _write(loader, zip(runner, cycle(chunks), strict=True))


def _views(loader: Loader) -> Generator[int]:
    """Run a kernel on decoded images in memory."""
    chunks = [loader.request_maker.chunk(positions) for positions in islice(loader.pieces(), _CHUNKS_KEPT)]
    requests = iter([chunk.request for chunk in chunks])
    runner = Runner(loader.renderer.build, requests.__next__)
    return _write(loader, cycle([(next(runner), chunk) for chunk in chunks]))


def _write(loader: Loader, rendered: Iterable[tuple[Outputs, Chunk]]) -> Generator[int]:
    """Write DALI's outputs for each chunk into a batch."""
    views = loader.empty_batch(0).views
    for outputs, chunk in rendered:
        loader.renderer.write(outputs, chunk.request.plan, [view.rows(0, len(chunk.positions)) for view in views])()
        yield len(chunk.positions)


def _hand_over(loader: Loader, device: torch.device) -> Generator[int]:
    """Copy finished views into a batch and move it to the device."""
    ready = loader.empty_batch(0)
    while True:
        for view in ready.views:
            pinned = device.type == "cuda" and view.image.is_pinned()
            (view.image if pinned else view.image.clone()).to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        yield len(ready)

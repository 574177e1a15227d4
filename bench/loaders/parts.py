"""The parts of our loader, each alone: the ceilings that say which of them is the limit.

Each runs with the loader's own code and number of threads, on what the part before it would have handed over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import cv2
import numpy as np
import torch

from pipelines.backends import make_backend, resolve_backend
from pipelines.batch import View
from pipelines.cores import available_cores
from pipelines.draws import NO_APPEARANCE, AppearanceConfig, ColourConfig, GeometryConfig
from pipelines.feed import Chunk, Feed, Quarantine
from pipelines.index import Index
from pipelines.loader import decodes_regions
from pipelines.order import build_order
from pipelines.plan import plan_views
from pipelines.probe import largest_pixels, samples_at_once
from pipelines.runner import Runner
from pipelines.views import Encoded, GraphConfig, Request, decode_pipeline
from train.config import Config

_VIEWS: Final = 2
_CHUNKS_KEPT: Final = 8
_FILES_KEPT: Final = 512
"""Files that the decoder goes round: of mixed sizes, a few chunks of a few images are no fair sample."""

_ENGINE_LOADS: Final = (0.0, 0.5, 0.8, 1.0)
"""Shares of the images for a GPU's JPEG engines: none, some, all."""


@dataclass(frozen=True)
class Part:
    """A part of the loader.

    Attributes:
        name: short, for a table.
        description: what it does, alone.
        start: makes the endless iterator of images done.
        as_configured: whether it is a part of the loader; else it is one with another setting, to compare.
    """

    name: str
    description: str
    start: Callable[[], Iterator[int]]
    as_configured: bool = True


def parts_of_loader(index: Index, config: Config, batch: int, device: torch.device) -> list[Part]:
    """All of them, for a loader as configured."""
    parts = LoaderParts(index, config, batch, device)
    plain = ColourConfig(jitter="none")
    found = [
        Part("read only", "files read, checked and queued, from the page cache; draws made", parts.read),
        Part("decode only", f"bytes in memory to decoded images, {parts.what_is_decoded}", parts.decode),
    ]
    if parts.on_gpu:
        found += [
            Part(f"decode only, {load:.0%} on engines", f"hw_decoder_load = {load}", partial(parts.decode, load), False)
            for load in _ENGINE_LOADS
        ]
    if parts.backend == "opencv":
        found += [
            Part(
                "geometry only",
                "decoded images to both views, colours as they are",
                lambda: parts.views(plain, NO_APPEARANCE),
            ),
            Part(
                "views only",
                "decoded images to both views, colours and all",
                lambda: parts.views(config.colour, config.appearance),
            ),
            Part("colour only", "the jitter of both views, of images that are views already", parts.colour),
        ]
    else:
        found += [
            Part(
                "decode + geometry",
                "the graph, colours as they are, from bytes in memory",
                lambda: parts.graph(plain, NO_APPEARANCE),
            ),
            Part(
                "decode + views",
                "the graph, from bytes in memory",
                lambda: parts.graph(config.colour, config.appearance),
            ),
        ]
    found.append(
        Part("hand-over only", "ready views copied into a batch, queued, and taken on the device", parts.hand_over)
    )
    return found


class LoaderParts:
    """The ways to run a part of our loader alone."""

    def __init__(self, index: Index, config: Config, batch: int, device: torch.device) -> None:
        self._index, self._config, self._batch, self._device = index, config, batch, device
        self._threads = config.pipelines.threads or available_cores()
        self.backend = resolve_backend(config.pipelines.backend, device)
        self.on_gpu = self.backend == "dali" and device.type == "cuda"
        decoder: Literal["cpu", "gpu"] = "gpu" if self.on_gpu else "cpu"
        pixels = largest_pixels(index)
        self._graph = GraphConfig(
            device=decoder,
            device_id=device.index or 0 if device.type == "cuda" else None,
            batch=min(config.pipelines.batch or samples_at_once(pixels), batch),
            threads=self._threads,
            prefetch=config.pipelines.prefetch,
            views=_VIEWS,
            hw_decoder_load=config.pipelines.hw_decoder_load,
            regions=decodes_regions(config.pipelines, decoder, pixels),
        )

    @property
    def what_is_decoded(self) -> str:
        """Regions, or whole images."""
        if self._graph.regions:
            return "of large ones only the regions that the views reach, as the loader does here"
        return "whole, as the loader does here"

    def read(self) -> Generator[int]:
        """Requests, as many at once as there are readers."""
        feed = self._feed(self._config.geometry)
        try:
            waiting = [feed.start(self._positions(number)) for number in range(self._threads)]
            number = len(waiting)
            while True:
                chunk = waiting.pop(0).result()
                waiting.append(feed.start(self._positions(number)))
                number += 1
                yield len(chunk.positions)
        finally:
            feed.close()

    def decode(self, hw_decoder_load: float | None = None) -> Generator[int]:
        """The decoder's pipeline, fed with bytes in memory; by itself with the configured share for the engines."""
        load = self._graph.hw_decoder_load if hw_decoder_load is None else hw_decoder_load
        graph = replace(self._graph, hw_decoder_load=load)
        requests = [chunk.request for chunk in self.encoded_chunks()]
        runner = Runner(lambda source: decode_pipeline(graph, source), _round_and_round(requests))
        while True:
            yield len(next(runner)[0])

    def graph(self, colour: ColourConfig, appearance: AppearanceConfig) -> Generator[int]:
        """The whole graph, fed with bytes in memory."""
        requests = [chunk.request for chunk in self.encoded_chunks()]
        backend = make_backend(self.backend, self._graph, self._config.geometry, colour, appearance)
        runner = Runner(backend.build, _round_and_round(requests))
        views = self._empty_views(self._graph.batch)
        while True:
            outputs = next(runner)
            backend.write(outputs, requests[0], views)
            yield self._graph.batch

    def views(self, colour: ColourConfig, appearance: AppearanceConfig) -> Generator[int]:
        """The fast path's kernel, on decoded images in memory."""
        geometry = self._config.geometry
        yield from self._write_views(self._chunks(_CHUNKS_KEPT, geometry), geometry, colour, appearance)

    def colour(self) -> Generator[int]:
        """The jitter of views that are views already: maps that move nothing, on images as large as a view."""
        still = replace(self._config.geometry, rotation_deg=(0.0, 0.0), translation_frac=0.0, scale=(1.0, 1.0))
        chunks = []
        for chunk in self._chunks(2, still):
            encoded = [_as_large_as_a_view(data, still.side_px) for data in chunk.request.encoded]
            plan = plan_views(
                np.full((len(encoded), 2), still.side_px),
                np.ones(len(encoded), np.int64),
                np.zeros((len(encoded), 3), np.float32),
                [view.draws for view in chunk.request.plan.views],
                still,
            )
            chunks.append(replace(chunk, request=Request(encoded, plan)))
        yield from self._write_views(chunks, still, self._config.colour, NO_APPEARANCE)

    def hand_over(self) -> Generator[int]:
        """Batches through a queue, from a thread that copies ready views into them, to the device."""
        ready = self._empty_views(self._batch)
        for view in ready:
            view.image.fill_(127)
        batches: queue.Queue[list[torch.Tensor]] = queue.Queue(self._config.pipelines.ahead)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                batch = [view.image.clone() for view in ready]
                while not stop.is_set():
                    try:
                        batches.put(batch, timeout=0.1)
                        break
                    except queue.Full:
                        continue

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while True:
                for image in batches.get():
                    image.to(self._device)
                yield self._batch
        finally:
            stop.set()
            thread.join()

    def _write_views(
        self, chunks: list[Chunk], geometry: GeometryConfig, colour: ColourConfig, appearance: AppearanceConfig
    ) -> Generator[int]:
        requests = iter([chunk.request for chunk in chunks])
        runner = Runner(lambda source: decode_pipeline(self._graph, source), requests.__next__)
        decoded = [next(runner) for _ in chunks]
        backend = make_backend(self.backend, self._graph, geometry, colour, appearance)
        views = self._empty_views(self._graph.batch)
        try:
            while True:
                for chunk, outputs in zip(chunks, decoded, strict=True):
                    for part in backend.write(outputs, chunk.request, views):
                        part.result()
                    yield len(chunk.positions)
        finally:
            backend.close()

    def encoded_chunks(self) -> list[Chunk]:
        """Files in memory, of so many images that they stand for the others."""
        images = min(len(self._index), _FILES_KEPT)
        return self._chunks(max(_CHUNKS_KEPT, -(-images // self._graph.batch)), self._config.geometry)

    def _chunks(self, count: int, geometry: GeometryConfig) -> list[Chunk]:
        feed = self._feed(geometry)
        try:
            return [feed.chunk(self._positions(number)) for number in range(count)]
        finally:
            feed.close()

    def _feed(self, geometry: GeometryConfig) -> Feed:
        return Feed(
            self._index,
            build_order(self._index, batch=self._batch, seed=self._config.run.seed),
            geometry,
            self._config.colour,
            seed=self._config.run.seed,
            views=_VIEWS,
            quarantine=Quarantine(),
            readers=self._threads,
            appearance=self._config.appearance,
            regions=self._graph.regions,
        )

    def _positions(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.arange(number * self._graph.batch, (number + 1) * self._graph.batch)

    def _empty_views(self, count: int) -> list[View]:
        side = self._config.geometry.side_px
        device = self._device if self.on_gpu else torch.device("cpu")
        return [
            View(
                torch.empty((count, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2),
                torch.empty(count, 2, 3),
                torch.empty(count, 2, 3),
            )
            for _ in range(_VIEWS)
        ]


def _as_large_as_a_view(data: Encoded, side_px: int) -> Encoded:
    image = cv2.imdecode(data, cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError("a file that passed the check does not decode in OpenCV")
    return np.asarray(cv2.imencode(".jpg", cv2.resize(image, (side_px, side_px)))[1], np.uint8)


def _round_and_round(requests: list[Request]) -> Callable[[], Request]:
    """One after the other, without end."""
    place = -1

    def following() -> Request:
        nonlocal place
        place = (place + 1) % len(requests)
        return requests[place]

    return following

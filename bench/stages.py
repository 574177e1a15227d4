"""The parts of our loader, each alone: the ceilings that say which of them is the limit.

Each runs with the loader's own code and number of threads, on what the part before it would have handed over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import cv2
import numpy as np
import torch

from machine.cores import available_cores
from pipelines.batch import View
from pipelines.feed import Chunk, Feed, Quarantine
from pipelines.render.backends import configure_graph, make_backend, resolve_backend
from pipelines.render.graph import decode_pipeline
from pipelines.render.request import Encoded, Request
from pipelines.render.runner import Runner
from pipelines.samples.index import Index
from pipelines.samples.order import build_order
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from pipelines.views.plan import plan_views
from train.config.pretraining import Config

_VIEWS: Final = 2
_CHUNKS_KEPT: Final = 8
_FILES_KEPT: Final = 512
"""Files that the decoder's stages go round: of mixed sizes, a few chunks of a few images are no fair sample."""

_ENGINE_LOADS: Final = (0.0, 0.5, 0.8, 1.0)
"""Shares of the images for a GPU's JPEG engines: none, some, all."""


@dataclass(frozen=True)
class Stage:
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


def stages(index: Index, config: Config, batch: int, device: torch.device) -> list[Stage]:
    """All of them, for a loader as configured."""
    parts = _Parts(index, config, batch, device)
    plain = Augmentation(config.geometry, ColourConfig(jitter="none"))
    found = [
        Stage("read only", "files read, checked and queued, from the page cache; draws made", parts.read),
        Stage("decode only", f"bytes in memory to decoded images, {parts.what_is_decoded}", parts.decode),
    ]
    if parts.on_gpu:
        found += [
            Stage(
                f"decode only, {load:.0%} on engines", f"hw_decoder_load = {load}", partial(parts.decode, load), False
            )
            for load in _ENGINE_LOADS
        ]
    if parts.backend == "opencv":
        found += [
            Stage(
                "geometry only",
                "decoded images to both views, colours as they are",
                lambda: parts.views(plain),
            ),
            Stage(
                "views only",
                "decoded images to both views, colours and all",
                lambda: parts.views(config.augmentation),
            ),
            Stage("colour only", "the jitter of both views, of images that are views already", parts.colour),
        ]
    else:
        found += [
            Stage(
                "decode + geometry",
                "the graph, colours as they are, from bytes in memory",
                lambda: parts.graph(plain),
            ),
            Stage(
                "decode + views",
                "the graph, from bytes in memory",
                lambda: parts.graph(config.augmentation),
            ),
        ]
    found.append(
        Stage("hand-over only", "ready views copied into a batch, queued, and taken on the device", parts.hand_over)
    )
    return found


class _Parts:
    def __init__(self, index: Index, config: Config, batch: int, device: torch.device) -> None:
        self._index, self._config, self._batch, self._device = index, config, batch, device
        self._threads = config.pipelines.threads or available_cores()
        self.backend = resolve_backend(config.pipelines.backend, device)
        self.on_gpu = self.backend == "dali" and device.type == "cuda"
        self._graph = configure_graph(index, config.pipelines, device, rows=batch, views=_VIEWS)

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

    def graph(self, augmentation: Augmentation) -> Generator[int]:
        """The whole graph, fed with bytes in memory."""
        requests = [chunk.request for chunk in self.encoded_chunks()]
        backend = make_backend(self.backend, self._graph, augmentation)
        runner = Runner(backend.build, _round_and_round(requests))
        views = self._empty_views(self._graph.batch)
        while True:
            outputs = next(runner)
            backend.write(outputs, requests[0].plan, views)()
            yield self._graph.batch

    def views(self, augmentation: Augmentation) -> Generator[int]:
        """The fast path's kernel, on decoded images in memory."""
        yield from self._write_views(self._chunks(_CHUNKS_KEPT, self._config.geometry), augmentation)

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
        yield from self._write_views(chunks, Augmentation(still, self._config.colour))

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

    def _write_views(self, chunks: list[Chunk], augmentation: Augmentation) -> Generator[int]:
        requests = iter([chunk.request for chunk in chunks])
        runner = Runner(lambda source: decode_pipeline(self._graph, source), requests.__next__)
        decoded = [next(runner) for _ in chunks]
        backend = make_backend(self.backend, self._graph, augmentation)
        views = self._empty_views(self._graph.batch)
        try:
            while True:
                for chunk, outputs in zip(chunks, decoded, strict=True):
                    backend.write(outputs, chunk.request.plan, views)()
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
            replace(self._config.augmentation, geometry=geometry),
            views=_VIEWS,
            quarantine=Quarantine(),
            readers=self._threads,
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

"""The loader: an endless, seekable stream of batches, made ahead of time on a CPU or on a GPU."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from machine.cores import available_cores, warn_of_threads
from pipelines.backends import make_backend, resolve_backend
from pipelines.batch import Batch, View
from pipelines.config import PipelinesConfig
from pipelines.decoder_memory import keep_decoded_in_cache
from pipelines.draws import NO_APPEARANCE, AppearanceConfig, ColourConfig, GeometryConfig, IntArray
from pipelines.feed import Chunk, Feed, Quarantine
from pipelines.index import Index
from pipelines.memory import PixelBuffers, keep_freed_memory
from pipelines.order import Order, RankSlice
from pipelines.probe import largest_pixels, samples_at_once
from pipelines.regions import LEAST_PIXELS
from pipelines.runner import DecodeError, Outputs, Runner, decodes
from pipelines.views import GraphConfig, Request


def decodes_regions(config: PipelinesConfig, decoder: Literal["cpu", "gpu"], pixels: int) -> bool:
    """Whether to decode regions, given the pixels of the largest of the sampled images."""
    return config.decode == "region" or (config.decode == "auto" and decoder == "cpu" and pixels >= LEAST_PIXELS)


class Loader:
    """Batches of augmented views, from any step on.

    Iterating starts a thread that works ahead; `close` (or the end of a `with` block) stops it. What a step gets is a
    pure function of the arguments, whatever the backend's speed and however often the run was interrupted.

    Args:
        index: the samples.
        order: which of them stands where in the global order.
        rows: the rows of each global batch that this rank loads.
        config: how views are made.
        geometry: ranges of the affine map.
        colour: ranges of the colour jitter.
        seed: the run's seed.
        device: where the batches are to be.
        views: views per sample.
        first_step: step of the first batch.
        last_step: the iteration ends before this step; None never ends it.
        processes_here: processes that share this machine's cores.
        quarantine: what is known to be bad, and grows.
        appearance: the further augmentations.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        rows: RankSlice,
        config: PipelinesConfig,
        geometry: GeometryConfig,
        colour: ColourConfig,
        *,
        seed: int,
        device: torch.device,
        views: int = 2,
        first_step: int = 0,
        last_step: int | None = None,
        processes_here: int = 1,
        quarantine: Quarantine | None = None,
        appearance: AppearanceConfig = NO_APPEARANCE,
    ) -> None:
        threads = config.threads or max(1, available_cores() // processes_here)
        if config.threads and rows.start == 0:  # rank 0's
            warn_of_threads("pipelines.threads", threads, processes_here)
        self.backend = resolve_backend(config.backend, device)
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self._rows, self._device, self._views = rows, device, views
        keep_freed_memory()
        keep_decoded_in_cache()
        self._buffers = PixelBuffers((len(rows), geometry.side_px, geometry.side_px, 3))
        self._steps = (first_step, last_step)
        self._ahead = config.ahead
        decoder: Literal["cpu", "gpu"] = "gpu" if self.backend == "dali" and device.type == "cuda" else "cpu"
        pixels = largest_pixels(index)
        regions = decodes_regions(config, decoder, pixels)
        self._graph = GraphConfig(
            device=decoder,
            device_id=device.index or 0 if device.type == "cuda" else None,
            batch=min(config.batch or samples_at_once(pixels), len(rows)),
            threads=threads,
            prefetch=config.prefetch,
            views=views,
            hw_decoder_load=config.hw_decoder_load,
            regions=regions,
        )
        self._feed = Feed(
            index,
            order,
            geometry,
            colour,
            seed=seed,
            views=views,
            quarantine=self.quarantine,
            readers=threads,
            appearance=appearance,
            regions=regions,
        )
        self._maker = make_backend(self.backend, self._graph, geometry, colour, appearance)
        self._stream = _side_stream(device) if self._graph.device == "gpu" else None
        self._stop = threading.Event()
        self._batches: queue.Queue[Batch | BaseException | None] = queue.Queue(self._ahead)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """The rank's rows of the batch of every step, in order.

        Raises:
            UserError: if so many files are bad that a position cannot be filled.
            RuntimeError: the loader is closed, before or while it is waited for.
        """
        if self._thread is not None:
            raise RuntimeError("a loader is iterated over once; make another one for another pass")
        if self._stop.is_set():
            raise RuntimeError(_CLOSED)
        self._thread = threading.Thread(target=self._work_ahead, name="loader", daemon=True)
        self._thread.start()
        while (item := self._batches.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if self._stream is not None:
                for view in item.views:  # made on the loader's stream, used on the consumer's
                    view.image.record_stream(torch.cuda.current_stream(self._device))
            yield item

    def close(self) -> None:
        """Stop working ahead and free what the pipelines hold."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._batches.get(timeout=0.05)
                except queue.Empty:
                    continue
            if self._batches.empty():  # for whoever waits for a batch
                self._batches.put_nowait(RuntimeError(_CLOSED))
        self._feed.close()
        self._maker.close()

    def _work_ahead(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                for batch in self._make_batches():
                    self._put(batch)
            self._put(None)
        except _Stopped:
            pass
        except BaseException as error:  # whatever it is, the consumer has to hear of it
            self._put_last(error)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._batches.put(item, timeout=0.1)
            except queue.Full:
                continue
        raise _Stopped

    def _put_last(self, error: BaseException) -> None:
        try:
            self._put(error)
        except _Stopped:
            return

    def _make_batches(self) -> Iterator[Batch]:
        pieces = self._pieces()
        reading = deque(self._feed.start(positions) for positions in islice(pieces, self._graph.threads))
        under_way: deque[Chunk] = deque()

        def next_request() -> Request:
            if self._stop.is_set() or not reading:
                raise StopIteration
            under_way.append(reading.popleft().result())
            reading.extend(self._feed.start(positions) for positions in islice(pieces, 1))
            return under_way[-1].request

        runner = Runner(self._maker.build, next_request)
        step = self._steps[0]
        while step != self._steps[1]:
            batch, row, unfinished = self._empty_batch(step), 0, list[Future[None]]()
            bad = [batch.bad]
            while row < len(self._rows):
                try:
                    outputs = next(runner)
                    chunk = under_way.popleft()
                except DecodeError:
                    outputs, chunk = self._rescue(under_way.popleft())
                except StopIteration:
                    raise _Stopped from None
                stop = row + len(chunk.positions)
                started = self._maker.write(outputs, chunk.request, [_rows(view, row, stop) for view in batch.views])
                _wait_for(unfinished)  # for the chunk before, so that the threads have the next when it is done
                unfinished = started
                batch.samples[row:stop] = torch.from_numpy(chunk.samples)
                bad.append(torch.from_numpy(chunk.bad))
                row = stop
            _wait_for(unfinished)
            yield replace(batch, bad=torch.cat(bad))
            step += 1

    def _pieces(self) -> Iterator[IntArray]:
        """Positions of one DALI batch after another; none crosses from one step to the next."""
        step, last = self._steps
        while step != last:
            positions = self._rows.positions(step)
            yield from np.array_split(positions, -(-len(positions) // self._graph.batch))
            step += 1

    def _rescue(self, chunk: Chunk) -> tuple[Outputs, Chunk]:
        """Make a chunk again without what does not decode; the pipeline's other chunks go on undisturbed."""
        while True:
            failing = [row for row in range(len(chunk.samples)) if not decodes(chunk.request.only(row), self._graph)]
            if not failing:
                raise RuntimeError(f"DALI failed on a batch of which every file decodes: positions {chunk.positions}")
            for sample in chunk.samples[failing].tolist():
                self.quarantine.add(sample, self._feed.index.path(sample), "its compressed data does not decode")
            chunk = self._feed.chunk(chunk.positions)
            try:
                return next(Runner(self._maker.build, iter([chunk.request]).__next__)), chunk
            except DecodeError:
                continue

    def _empty_batch(self, step: int) -> Batch:
        count, pin = len(self._rows), self._device.type == "cuda"
        views = tuple(
            View(
                self._empty_pixels().permute(0, 3, 1, 2),
                torch.empty(count, 2, 3, pin_memory=pin),
                torch.empty(count, 2, 3, pin_memory=pin),
            )
            for _ in range(self._views)
        )
        positions = torch.from_numpy(self._rows.positions(step))
        return Batch(views, torch.empty(count, dtype=torch.int64), positions)

    def _empty_pixels(self) -> Tensor:
        if self._device.type == "cpu":
            return self._buffers.tensor()
        if self._graph.device == "gpu":
            return torch.empty(self._buffers.shape, dtype=torch.uint8, device=self._device)
        return torch.empty(self._buffers.shape, dtype=torch.uint8, pin_memory=True)


_CLOSED = "the loader is closed; make another one"


class _Stopped(Exception):  # noqa: N818  not an error: the consumer has left
    """The loader was closed."""


def _wait_for(work: list[Future[None]]) -> None:
    for part in work:
        part.result()


def _rows(view: View, start: int, stop: int) -> View:
    return View(view.image[start:stop], view.matrix[start:stop], view.source_to_view_px[start:stop])


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream

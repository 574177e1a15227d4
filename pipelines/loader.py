"""The loader: an endless stream of batches from any step on, prepared ahead on a CPU or a GPU."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from machine.cores import warn_of_threads
from pipelines.arrays import IntArray
from pipelines.batch import Batch, View
from pipelines.config import PipelinesConfig
from pipelines.render.backends import configure_graph, make_renderer, resolve_backend
from pipelines.render.buffers import PixelBuffers
from pipelines.render.request import Request
from pipelines.render.runner import DecodeError, FileDecoder, Outputs, Runner
from pipelines.request_maker import Chunk, Quarantine, RequestMaker
from pipelines.samples.index import Index
from pipelines.samples.order import Schedule
from pipelines.samples.store import Follower
from pipelines.views.augmentation import Augmentation


class Loader:
    """Iterates over batches of augmented views, from any step on.

    Iterating starts a thread that prepares batches ahead; `close` (or the end of a `with` block) stops it. A step's
    batch is a pure function of the arguments: neither speed nor interruptions change it.

    Args:
        schedule: the samples that this rank loads at each step; the seed of its order is the seed of all draws.
        processes_here: processes that share this machine's cores.
        quarantine: bad samples; new ones are added.

    Attributes:
        backend: the backend in use.
        request_maker: reads and plans chunks.
        renderer: makes the views of a chunk.
    """

    def __init__(
        self,
        index: Index,
        schedule: Schedule,
        config: PipelinesConfig,
        augmentation: Augmentation,
        *,
        device: torch.device,
        views: int = 2,
        processes_here: int = 1,
        quarantine: Quarantine | None = None,
    ) -> None:
        rows, side_px = schedule.rows, augmentation.geometry.side_px
        self.backend = resolve_backend(config.backend, device)
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self._schedule, self._device, self._views = schedule, device, views
        self.graph = configure_graph(
            index,
            config,
            device,
            rows=len(rows),
            views=views,
            processes_here=processes_here,
            geometry=augmentation.geometry,
        )
        if rows.start == 0 and config.threads:  # on rank 0
            warn_of_threads("pipelines.threads", config.threads, processes_here)
        self._buffers = PixelBuffers((len(rows), side_px, side_px, 3))
        self.request_maker = RequestMaker(
            index,
            schedule.order,
            augmentation,
            views=views,
            quarantine=self.quarantine,
            readers=self.graph.threads,
            regions=self.graph.regions,
        )
        self.renderer = make_renderer(self.backend, self.graph, augmentation)
        self._stream: torch.cuda.Stream | None = None
        if self.graph.device == "gpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stop = threading.Event()
        self._batches: queue.Queue[Batch | BaseException | None] = queue.Queue(config.ahead)
        self._thread: threading.Thread | None = None
        self._follower = Follower()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's rows of the batch of every step, in order.

        Raises:
            UserError: too many files are bad to fill a position, or the machine cannot read or decode.
            RuntimeError: the loader is closed.
        """
        if self._thread is not None:
            raise RuntimeError("a loader is iterated over once; make another one for another pass")
        if self._stop.is_set():
            raise RuntimeError(_CLOSED)
        self._follower = self.request_maker.index.follow(self._schedule.samples)
        self._thread = threading.Thread(target=self._work_ahead, name="loader", daemon=True)
        self._thread.start()
        while (item := self._batches.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if self._stream is not None:
                for view in item.views:  # tells the allocator that the consumer's stream uses the tensors too
                    view.image.record_stream(torch.cuda.current_stream(self._device))
            yield item

    def stop(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._stop.set()
        self.request_maker.stop()
        self._follower.close()

    def close(self) -> None:
        """Stop the thread and free the memory of the pipelines."""
        self.stop()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._batches.get(timeout=0.05)
                except queue.Empty:
                    continue
            if self._batches.empty():  # wakes a consumer that waits for a batch
                self._batches.put_nowait(RuntimeError(_CLOSED))
        self.request_maker.close()
        self.renderer.close()

    def _work_ahead(self) -> None:
        try:
            if self._stream is not None:  # a thread begins on GPU 0, and goes back there when it leaves the stream
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                for batch in self._make_batches():
                    self._put(batch)
            self._put(None)
        except _Stopped:
            pass
        except BaseException as error:  # every error is raised again in the consumer
            with suppress(_Stopped):
                self._put(error)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._batches.put(item, timeout=0.1)
            except queue.Full:
                continue
        raise _Stopped

    def _make_batches(self) -> Iterator[Batch]:
        pieces = self.pieces()
        reading = deque(self.request_maker.start(piece) for piece in itertools.islice(pieces, self.graph.threads))
        under_way: deque[Chunk] = deque()

        def next_request() -> Request:
            if self._stop.is_set() or not reading:
                raise StopIteration
            under_way.append(reading.popleft().result())
            reading.extend(self.request_maker.start(piece) for piece in itertools.islice(pieces, 1))
            return under_way[-1].request

        runner = Runner(self.renderer.build, next_request)
        for step in self._schedule.steps():
            batch, row = self.empty_batch(step), 0
            finish: Callable[[], None] | None = None
            bad = [batch.bad]
            while row < len(batch):
                try:
                    outputs = next(runner)
                    chunk = under_way.popleft()
                except DecodeError:
                    outputs, chunk = self._rescue(under_way.popleft())
                except StopIteration:
                    raise _Stopped from None
                stop = row + len(chunk.positions)
                views = [view.rows(row, stop) for view in batch.views]
                finish_this = self.renderer.write(outputs, chunk.request.plan, views)
                if finish is not None:
                    finish()  # finish the previous chunk only now, so that the threads have work when it is done
                finish = finish_this
                batch.samples[row:stop] = torch.from_numpy(chunk.samples)
                bad.append(torch.from_numpy(chunk.bad))
                row = stop
            if finish is not None:
                finish()
            self._follower.done()
            yield replace(batch, bad=torch.cat(bad))

    def pieces(self) -> Iterator[IntArray]:
        """Yield the positions of each DALI batch. A DALI batch never contains positions of two steps."""
        for step in self._schedule.steps():
            positions = self._schedule.rows.positions(step)
            yield from np.array_split(positions, -(-len(positions) // self.graph.batch))

    @cached_property
    def _decoder(self) -> FileDecoder:
        """Decodes single files; few runs need it."""
        return FileDecoder(replace(self.graph, batch=1, threads=1))

    def _rescue(self, chunk: Chunk) -> tuple[Outputs, Chunk]:
        """Make a chunk again without the files that do not decode. Other chunks are not affected.

        Raises:
            UserError: the machine is at fault, not the files.
        """
        while True:
            failing = [row for row in range(len(chunk.samples)) if not self._decoder.decodes(chunk.request.only(row))]
            if not failing:
                raise RuntimeError(f"DALI failed on a batch of which every file decodes: positions {chunk.positions}")
            for sample in chunk.samples[failing].tolist():
                self.quarantine.add(
                    sample, self.request_maker.index.path(sample), "its compressed data does not decode"
                )
            chunk = self.request_maker.chunk(chunk.positions)
            try:
                return next(Runner(self.renderer.build, iter([chunk.request]).__next__)), chunk
            except DecodeError:
                continue

    def empty_batch(self, step: int) -> Batch:
        """A batch with uninitialised tensors for the views and samples of a step."""
        count, pin = len(self._schedule.rows), self._device.type == "cuda"
        views = tuple(
            View(
                self._empty_pixels().permute(0, 3, 1, 2),
                torch.empty(count, 2, 3, pin_memory=pin),
                torch.empty(count, 2, 3, pin_memory=pin),
            )
            for _ in range(self._views)
        )
        positions = torch.from_numpy(self._schedule.rows.positions(step))
        return Batch(views, torch.empty(count, dtype=torch.int64), positions)

    def _empty_pixels(self) -> Tensor:
        if self._device.type == "cpu":
            return self._buffers.tensor()
        if self.graph.device == "gpu":
            return torch.empty(self._buffers.shape, dtype=torch.uint8, device=self._device)
        return torch.empty(self._buffers.shape, dtype=torch.uint8, pin_memory=True)


_CLOSED = "the loader is closed; make another one"


class _Stopped(Exception):  # noqa: N818  not an error: the consumer has left
    """The loader was closed."""

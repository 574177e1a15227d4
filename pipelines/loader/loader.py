"""The loader: an endless stream of batches from any step on, prepared ahead on a CPU or a GPU.

Its stages, in a row, each in a file of its own:

    positions -> samples and files (read.py) -> plan (plan.py) -> DALI (render/runner.py) -> views (render/renderers.py)

A `Chunk` (render/chunk.py) passes through all of them. The last stage writes it into its rows of the step's batch.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, from_numpy

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.loader.read import CLOSED, Quarantine, Reader, plan_chunk
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.renderers import make_renderer
from peclr_dali.pipelines.render.runner import FileDecoder, Outputs, run_chunks
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule
from peclr_dali.pipelines.views.augmentation import Augmentation


class PixelBuffers:
    """Arrays of one shape that are reused when their tensors are gone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._spare: list[npt.NDArray[np.uint8]] = []

    def tensor(self) -> Tensor:
        """An uninitialised uint8 tensor of this shape. Its memory is reused when nothing refers to it any more."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(self.shape, np.uint8)  # NumPy asks for huge pages
        lent = buffer.view()  # lives as long as a tensor shares its memory; the buffer outlives it
        weakref.finalize(lent, self._spare.append, buffer).atexit = False
        return from_numpy(lent)


class Loader:
    """Iterates over batches of augmented views, from any step on.

    Iterating starts a thread that prepares batches ahead; `close` (or the end of a `with` block) stops it. A step's
    batch is a pure function of the arguments: neither speed nor interruptions change it.

    Args:
        schedule: the samples that this rank loads at each step; the seed of its order is the seed of all draws.
        augmentation: one for all views, or one for each view, with one `geometry.fill`.
        views: number of views, given one augmentation for all.
        processes_here: processes that share this machine's cores.
        quarantine: bad samples; new ones are added.

    Attributes:
        settings: the choices made for this index, device and machine.
        images: images in a row, 2 for pairs.
    """

    def __init__(
        self,
        index: Index,
        schedule: Schedule,
        config: PipelinesConfig,
        augmentation: Augmentation | Sequence[Augmentation],
        *,
        device: torch.device,
        views: int = 2,
        processes_here: int = 1,
        quarantine: Quarantine | None = None,
    ) -> None:
        rows = schedule.rows
        each = (augmentation,) * views if isinstance(augmentation, Augmentation) else tuple(augmentation)
        geometries = list(dict.fromkeys(one.geometry for one in each))
        self._partners = index.partners if len(each) > 1 else None
        self.images = images = 1 if self._partners is None else 2
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self.settings = choose_settings(
            index, config, device, rows=len(rows), images=images, processes_here=processes_here, geometries=geometries
        )
        self._index, self._schedule, self._device = index, schedule, device
        self._stop = threading.Event()
        self._reader = Reader(index, schedule.order, self.quarantine, self._stop, self._partners)
        self._plan = partial(plan_chunk, index=index, order=schedule.order, augmentations=each, settings=self.settings)
        self._readers = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="read")
        if images == 2:
            _require_pairs_of_views(each, self.settings)
        self._renderers = [make_renderer(self.settings, each[number::images]) for number in range(images)]
        self._rows_in_chunk = self.settings.chunk_size // images
        self._sides_px = [one.geometry.side_px for one in each]
        self._buffers = {side_px: PixelBuffers((len(rows), side_px, side_px, 3)) for side_px in self._sides_px}
        self._stream: torch.cuda.Stream | None = None
        if self.settings.device == "gpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._batches: queue.Queue[Batch | BaseException | None] = queue.Queue(config.ahead)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's rows of the batch of every step, in order.

        Raises:
            UserError: too many files are bad to fill a position, or the machine cannot read or decode.
            RuntimeError: the loader is closed, or this process was forked from the one that made it.
        """
        if self._thread is not None:
            raise RuntimeError("a loader is iterated over once; make another one for another pass")
        self._require_own_process()
        if self._stop.is_set():
            raise RuntimeError(CLOSED)
        self._thread = threading.Thread(target=self._work_ahead, name="loader", daemon=True)
        self._thread.start()
        while (item := self._next_item()) is not None:
            if isinstance(item, BaseException):
                raise item
            if self._stream is not None:
                for view in item.views:  # tells the allocator that the consumer's stream uses the tensors too
                    view.image.record_stream(torch.cuda.current_stream(self._device))
            yield item

    def _next_item(self) -> Batch | BaseException | None:
        self._require_own_process()
        return self._batches.get()

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the loader belongs to process {self._process}, and its threads are not in process {os.getpid()}, "
                "which was forked from it: make a loader in each process, after the fork"
            )

    def stop(self) -> None:
        """Tell the threads to end, without waiting for them."""
        self._stop.set()

    def close(self) -> None:
        """Stop the threads and free the memory of the pipelines. In a forked process, do nothing: it has neither."""
        if os.getpid() != self._process:
            return
        self.stop()
        if self._thread is not None:
            while self._thread.is_alive():
                with suppress(queue.Empty):
                    self._batches.get(timeout=0.05)
            if self._batches.empty():  # wakes a consumer that waits for a batch
                self._batches.put_nowait(RuntimeError(CLOSED))
        self._readers.shutdown(cancel_futures=True)
        for renderer in self._renderers:
            renderer.close()

    def _work_ahead(self) -> None:
        try:
            if self._stream is not None:  # a thread begins on GPU 0, and goes back there when it leaves the stream
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                if all(map(self._put, self._make_batches())):
                    self._put(None)
        except BaseException as error:  # every error is raised again in the consumer
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Hand an item to the consumer; False if the loader was stopped before."""
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._batches.put(item, timeout=0.1)
                return True
        return False

    def _make_batches(self) -> Iterator[Batch]:
        # DALI pulls the chunks while this thread waits for its outputs. All renderers share the first one's decoder.
        decoded = run_chunks(self._renderers[0].build, self.chunks())
        chunks_in_step = -(-len(self._schedule.rows) // self._rows_in_chunk)
        for step in self._schedule.steps():
            batch, row, bad = self._empty_batch(step), 0, []
            unfinished: list[Callable[[], None]] = []
            for chunk, outputs in islice(decoded, chunks_in_step):
                if outputs is None:
                    chunk, outputs = self._repair(chunk)
                started = self._write(chunk, outputs, batch, row)
                _finish(unfinished)  # the previous chunk only now, so that the threads have work when it is done
                unfinished = started
                bad.append(torch.from_numpy(chunk.bad))
                row += len(chunk)
            _finish(unfinished)
            if row < len(batch):  # the loader was stopped
                return
            yield replace(batch, bad=torch.cat(bad))

    def _write(self, chunk: Chunk, outputs: Outputs, batch: Batch, row: int) -> list[Callable[[], None]]:
        """Start to write a chunk into the rows of a batch from `row` on; returns functions that wait for it."""
        started, stop = [], row + len(chunk)
        for number, half in enumerate(chunk.halves):
            views = slice(number, None, self.images)
            into = [view.rows(row, stop) for view in batch.views[views]]
            started.append(self._renderers[number].write(outputs, half, chunk.plan.of(half), into))
            batch.samples[row:stop, views] = torch.from_numpy(chunk.samples[half])[:, None]
        return started

    def chunks(self) -> Iterator[Chunk]:
        """Read and plan the chunks of all steps, as many at once as there are threads, and yield them in order."""
        positions = self._positions()
        reading = deque(self._readers.submit(self._prepare, one) for one in islice(positions, self.settings.threads))
        while reading and not self._stop.is_set():
            chunk = reading.popleft().result()
            reading.extend(self._readers.submit(self._prepare, one) for one in islice(positions, 1))
            yield chunk

    def _positions(self) -> Iterator[IntArray]:
        """The positions of each chunk. A chunk never has positions of two steps."""
        for step in self._schedule.steps():
            positions = self._schedule.rows.positions(step)
            yield from np.array_split(positions, -(-len(positions) // self._rows_in_chunk))

    def _prepare(self, positions: IntArray) -> Chunk:
        return self._plan(self._reader.read(Chunk(positions)))

    @cached_property
    def _decoder(self) -> FileDecoder:
        """Decodes single files; few runs need it."""
        return FileDecoder(replace(self.settings, chunk_size=1, threads=1))

    def _repair(self, chunk: Chunk) -> tuple[Chunk, Outputs]:
        """Make a chunk again without the files that do not decode. Other chunks are not affected.

        Raises:
            UserError: the machine is at fault, not the files.
        """
        outputs: Outputs | None = None
        while outputs is None:
            failing = [
                sample
                for image, sample in enumerate(chunk.samples.tolist())
                if not self._decoder.decodes(chunk.only(image))
            ]
            if not failing:
                raise RuntimeError(f"DALI failed on a batch of which every file decodes: positions {chunk.positions}")
            for sample in failing:
                self.quarantine.add(sample, self._index.location(sample), "its compressed data does not decode")
            ((chunk, outputs),) = run_chunks(self._renderers[0].build, iter([self._prepare(chunk.positions)]))
        return chunk, outputs

    def _empty_batch(self, step: int) -> Batch:
        """A batch with uninitialised tensors for the views and samples of a step."""
        count, pin = len(self._schedule.rows), self._device.type == "cuda"
        views = tuple(
            View(
                self._empty_pixels(self._buffers[side_px]).permute(0, 3, 1, 2),
                torch.empty(count, 2, 3, pin_memory=pin),
                torch.empty(count, 2, 3, pin_memory=pin),
            )
            for side_px in self._sides_px
        )
        positions = torch.from_numpy(self._schedule.rows.positions(step))
        samples = torch.empty(count, len(views), dtype=torch.int64)
        return Batch(views, samples, positions, all_keypoints_px=self._index.keypoints_px)

    def _empty_pixels(self, buffers: PixelBuffers) -> Tensor:
        if self._device.type == "cpu":
            return buffers.tensor()
        if self.settings.device == "gpu":
            return torch.empty(buffers.shape, dtype=torch.uint8, device=self._device)
        return torch.empty(buffers.shape, dtype=torch.uint8, pin_memory=True)


def _finish(unfinished: Sequence[Callable[[], None]]) -> None:
    for wait in unfinished:
        wait()


def _require_pairs_of_views(augmentations: Sequence[Augmentation], settings: Settings) -> None:
    """Check that the views can be made of pairs of images, views 0, 2, ... of the first and 1, 3, ... of the second.

    Raises:
        UserError: their number is odd, or the DALI graph, which has the same nodes for both images, cannot make them.
    """
    if len(augmentations) % 2:
        raise UserError(
            f"{len(augmentations)} views of pairs of images (data.positive): expected an even number, such as 2"
        )
    nodes = [(one.geometry.side_px, one.geometry.antialias, one.colour.jitter) for one in augmentations]
    if settings.views == "dali" and nodes[::2] != nodes[1::2]:
        raise UserError(
            'pipelines.views = "dali" makes views of pairs of images alike: give both views one geometry.side_px, '
            'geometry.antialias and colour.jitter, or set pipelines.views = "auto"'
        )

"""The loader: an endless stream of batches from any step on, prepared ahead on a CPU or a GPU.

Its stages, in a row, each in a file of its own:

    positions -> samples and files (read.py) -> plan (plan.py) -> DALI (render/runner.py) -> views (render/renderers.py)

A `Chunk` (render/chunk.py) passes through all of them. The last stage writes it into its rows of the step's batch.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, tee
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peclr_dali.machine.cores import warn_of_threads
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.loader.buffers import PixelBuffers
from peclr_dali.pipelines.loader.plan import plan_chunk
from peclr_dali.pipelines.loader.read import CLOSED, Quarantine, Reader
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.renderers import make_renderer
from peclr_dali.pipelines.render.runner import FileDecoder, run_chunks
from peclr_dali.pipelines.render.settings import choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule
from peclr_dali.pipelines.samples.store import Prefetch
from peclr_dali.pipelines.views.augmentation import Augmentation


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
            index,
            config,
            device,
            rows=len(rows),
            images=images,
            processes_here=processes_here,
            geometries=geometries,
        )
        if rows.start == 0 and config.threads:  # on rank 0
            warn_of_threads("pipelines.threads", config.threads, processes_here)
        self._index, self._schedule, self._device = index, schedule, device
        self._stop = threading.Event()
        self._reader = Reader(index, schedule.order, self.quarantine, self._stop, self._partners)
        self._plan = partial(plan_chunk, index=index, order=schedule.order, augmentations=each, settings=self.settings)
        self._readers = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="read")
        self._renderers = [make_renderer(self.settings, each[number::images]) for number in range(images)]
        self._sides_px = [one.geometry.side_px for one in each]
        self._buffers = {side_px: PixelBuffers((len(rows), side_px, side_px, 3)) for side_px in self._sides_px}
        self._stream: torch.cuda.Stream | None = None
        if self.settings.device == "gpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._batches: queue.Queue[Batch | BaseException | None] = queue.Queue(config.ahead)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._prefetch = Prefetch()

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
        self._prefetch = self._index.prefetch(partial(self._schedule.samples, self._partners))
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
        self._prefetch.close()

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
        decoded = self._decoded(self.chunks())
        chunks_in_step = -(-len(self._schedule.rows) // self.settings.chunk_size)
        for step in self._schedule.steps():
            batch, row = self._empty_batch(step), 0
            finish: list[Callable[[], None]] = []
            bad = [batch.bad]
            for chunk, outputs in islice(decoded, chunks_in_step):
                chunk, outputs = self._repair(chunk) if None in outputs else (chunk, outputs)
                stop = row + len(chunk)
                finish_these = []
                for number, (image, of_image) in enumerate(zip(chunk.images, outputs, strict=True)):
                    views = slice(number, None, self.images)
                    into = [view.rows(row, stop) for view in batch.views[views]]
                    finish_these.append(self._renderers[number].write(of_image, image.plan, into))
                    batch.samples[row:stop, views] = torch.from_numpy(image.samples)[:, None]
                for done in finish:
                    done()  # finish the previous chunk only now, so that the threads have work when it is done
                finish = finish_these
                bad.append(torch.from_numpy(chunk.bad))
                row = stop
            for done in finish:
                done()
            if row < len(batch):  # the loader was stopped
                return
            self._prefetch.done()
            yield replace(batch, bad=torch.cat(bad))

    def _decoded(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, tuple[Any, ...]]]:
        """Run DALI on chunks: each with the outputs of its images, None for those of which a file does not decode."""
        streams = [
            run_chunks(renderer.build, map(itemgetter(number), map(attrgetter("images"), copy)))
            for number, (renderer, copy) in enumerate(zip(self._renderers, tee(chunks, self.images), strict=True))
        ]
        for decoded in zip(*streams, strict=True):
            yield decoded[0][0], tuple(outputs for _, outputs in decoded)

    def chunks(self) -> Iterator[Chunk]:
        """Read and plan the chunks of all steps, as many at once as there are threads, and yield them in order."""
        positions = self._positions()
        reading = deque(self._readers.submit(self._read, one) for one in islice(positions, self.settings.threads))
        while reading and not self._stop.is_set():
            chunk = reading.popleft().result()
            reading.extend(self._readers.submit(self._read, one) for one in islice(positions, 1))
            yield chunk

    def _positions(self) -> Iterator[IntArray]:
        """The positions of each chunk. A chunk never has positions of two steps."""
        for step in self._schedule.steps():
            positions = self._schedule.rows.positions(step)
            yield from np.array_split(positions, -(-len(positions) // self.settings.chunk_size))

    def _read(self, positions: IntArray) -> Chunk:
        return self._plan(self._reader.read(Chunk(positions)))

    @cached_property
    def _decoder(self) -> FileDecoder:
        """Decodes single files; few runs need it."""
        return FileDecoder(replace(self.settings, chunk_size=1, threads=1))

    def _repair(self, chunk: Chunk) -> tuple[Chunk, tuple[Any, ...]]:
        """Make a chunk again without the files that do not decode. Other chunks are not affected.

        Raises:
            UserError: the machine is at fault, not the files.
        """
        outputs: tuple[Any, ...] = (None,)
        while None in outputs:
            failing = [
                int(image.samples[row])
                for image in chunk.images
                for row in range(len(chunk))
                if not self._decoder.decodes(image.only(row))
            ]
            if not failing:
                raise RuntimeError(f"DALI failed on a batch of which every file decodes: positions {chunk.positions}")
            for sample in failing:
                self.quarantine.add(sample, self._index.path(sample), "its compressed data does not decode")
            ((chunk, outputs),) = self._decoded(iter([self._read(chunk.positions)]))
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

"""The loader: a stream of batches from any step on. Its stages stand in a row:

    positions -> samples (samples/order.py) -> files -> plan (prepare.py)
        -> decoded images (render/runner.py) -> views (render/renderers.py)

A `Chunk` (views/plan.py) passes through all of them. The last stage writes its views into rows of the step's batch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import Batch, BatchMemory
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.loader.ahead import Ahead
from peclr_dali.pipelines.loader.prepare import Planner, Quarantine, Reader
from peclr_dali.pipelines.render.renderers import make_renderer
from peclr_dali.pipelines.render.runner import FileDecoder, Outputs, run_chunks
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.plan import Chunk


def build_loader(
    index: Index,
    schedule: Schedule,
    config: PipelinesConfig,
    augmentation: Augmentation | Sequence[Augmentation],
    *,
    device: torch.device,
    views: int = 2,
    processes_here: int = 1,
    quarantine: Quarantine | None = None,
) -> "Loader":
    """Build a loader with the settings that suit the images and this machine; reads the sizes of a few images.

    Args:
        augmentation: one for all views, or one for each view, with one `geometry.fill`.
        views: number of views, given one augmentation for all.
        processes_here: processes that share this machine's cores.
        quarantine: bad samples; new ones are added.

    Raises:
        UserError: the configuration asks for what this machine or the data does not allow.
    """
    augmentations = [augmentation] * views if isinstance(augmentation, Augmentation) else list(augmentation)
    if len(augmentations) == 1:
        index = replace(index, partners=None)  # a single view shows one image
    settings = choose_settings(
        index,
        config,
        device,
        rows=len(schedule.rows),
        processes_here=processes_here,
        geometries=[augmentation.geometry for augmentation in augmentations],
    )
    if settings.views == "dali" and index.partners is not None:
        raise UserError(
            'pipelines.views = "dali" makes all views of one image, and the data has pairs of images (data.positive): '
            f'set data.positive = "self", or pipelines.views = "auto" ({settings.why})'
        )
    quarantine = Quarantine() if quarantine is None else quarantine
    return Loader(index, schedule, augmentations, settings, device, quarantine)


class Loader:
    """Iterates over batches of augmented views, from any step on.

    Iterating starts a thread that prepares batches ahead; `close` (or the end of a `with` block) stops it. A step's
    batch is a pure function of the arguments: neither speed nor interruptions change it.

    Args:
        index: the samples. If they have partners, each row holds two images.
        schedule: the samples that this rank loads at each step; the seed of its order is the seed of all draws.
        augmentations: of each view, with one `geometry.fill`.
        settings: the choices made for this index, device and machine.
        device: device of the batches.
        quarantine: bad samples; new ones are added.
    """

    def __init__(
        self,
        index: Index,
        schedule: Schedule,
        augmentations: Sequence[Augmentation],
        settings: Settings,
        device: torch.device,
        quarantine: Quarantine,
    ) -> None:
        self.settings, self.quarantine = settings, quarantine
        self._index, self._schedule = index, schedule
        rows, chunks = len(schedule.rows), -(-len(schedule.rows) // (settings.chunk_size // settings.images_per_row))
        self._rows_of_chunks = [
            slice(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(rows), chunks)
        ]
        stream = torch.cuda.Stream(device) if settings.device == "gpu" else None  # type: ignore[no-untyped-call]
        self._ahead = Ahead(settings.ahead, stream)
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="read")
        self._order = schedule.order
        self._reader = Reader(index, self._order, quarantine, self._ahead.stopped)
        self._planner = Planner(index, self._order, augmentations, settings.regions)
        self._renderer = make_renderer(settings, augmentations)
        sides_px = [augmentation.geometry.side_px for augmentation in augmentations]
        made_on = device if settings.device == "gpu" else torch.device("cpu")
        self._memory = BatchMemory(rows, sides_px, device, made_on, index.keypoints_px)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's rows of the batch of every step, in order.

        Raises:
            UserError: too many files are bad to fill a position, or the machine cannot read or decode.
            RuntimeError: the loader is closed, or this process was forked from the one that made it.
        """
        return self._ahead.iterate(self.batches())

    def batches(self) -> Iterator[Batch]:
        """Make the batches, in the calling thread. The chunks of the next steps are read and decoded meanwhile."""
        decoded = self.decoded()
        for step in self._schedule.steps():
            batch = self._memory.batch(self._schedule.positions(step))
            bad = []
            for rows in self._rows_of_chunks:
                chunk, outputs = next(decoded)
                self._renderer.write(outputs, chunk.plan, [view.rows(rows) for view in batch.views])
                batch.samples[rows] = torch.from_numpy(chunk.samples[chunk.plan.image].T)
                bad.append(chunk.bad)
            self._renderer.finish()
            batch.bad = torch.from_numpy(np.concatenate(bad))
            yield batch

    def decoded(self) -> Iterator[tuple[Chunk, Outputs]]:
        """The chunks of all steps with DALI's outputs. DALI takes the next chunks while its outputs are used."""
        for chunk, outputs in run_chunks(self._renderer.build, self.planned()):
            if outputs is None:
                yield self._repair(chunk)
            else:
                yield chunk, outputs

    def planned(self) -> Iterator[Chunk]:
        """The chunks of all steps, read and planned by as many threads as there are, a chunk in each, in order."""
        ahead: deque[Future[Chunk]] = deque()
        for step in self._schedule.steps():
            positions = self._schedule.positions(step)
            for rows in self._rows_of_chunks:
                ahead.append(self._threads.submit(self._prepare, positions[rows]))
                if len(ahead) > self.settings.threads:
                    yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _prepare(self, positions: IntArray) -> Chunk:
        """The chunk at some positions, read and planned."""
        chunk = Chunk(positions, self._order.samples_at(positions))
        return self._planner.add_plan(self._reader.add_files(chunk))

    def _repair(self, chunk: Chunk) -> tuple[Chunk, Outputs]:
        """Make a chunk again without the files that do not decode. Other chunks are not affected.

        Raises:
            UserError: the machine is at fault, not the files.
        """
        outputs: Outputs | None = None
        while outputs is None:
            images = [image for image in range(len(chunk.files)) if not self._decoder.decodes(chunk.only(image))]
            if not images:
                raise RuntimeError(f"DALI failed on a batch of which every file decodes: positions {chunk.positions}")
            for sample in chunk.samples[images].tolist():
                self.quarantine.add(sample, self._index.location(sample), "its compressed data does not decode")
            ((chunk, outputs),) = run_chunks(self._renderer.build, iter([self._prepare(chunk.positions)]))
        return chunk, outputs

    @cached_property
    def _decoder(self) -> FileDecoder:
        """Decodes single files; few runs need it."""
        return FileDecoder(replace(self.settings, chunk_size=1, threads=1))

    def stop(self) -> None:
        """Tell the threads to end, without waiting for them."""
        self._ahead.stopped.set()

    def close(self) -> None:
        """Stop the threads and free the memory of the pipelines. In a forked process, do nothing: it has neither."""
        if self._ahead.is_of_this_process:
            self._ahead.close()
            self._threads.shutdown(cancel_futures=True)
            self._renderer.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

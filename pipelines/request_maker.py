"""Makes requests from positions: reads files, replaces bad ones, and plans the views."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import UserError
from pipelines.arrays import FloatArray, IntArray
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage, ImageFile
from pipelines.files.reading import read_sound_jpegs
from pipelines.render.request import Request
from pipelines.samples.index import Index
from pipelines.samples.order import Order
from pipelines.views.augmentation import Augmentation
from pipelines.views.draws import draw_view
from pipelines.views.plan import plan_views

log = logging.getLogger(__name__)

SUBSTITUTE_ATTEMPTS = 64
"""Number of bad substitutes in a row after which the run stops: the whole source is probably broken."""


class Quarantine:
    """Samples that cannot be used. Each is logged once. Several threads may use it."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, sample: int) -> bool:
        return sample in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, sample: int, path: Path, reason: str) -> None:
        """Add a bad sample, and log it if it is new."""
        with self._lock:
            if sample in self._reasons:
                return
            self._reasons[sample] = reason
        log.warning("%s cannot be used (%s): another image takes its place", path, reason)

    @property
    def reasons(self) -> dict[int, str]:
        """Row of the index -> reason."""
        with self._lock:
            return dict(self._reasons)


@dataclass(frozen=True)
class Chunk:
    """A request with its (N,) positions, the (N,) samples that were read, and the bad samples found on the way."""

    request: Request
    positions: IntArray
    samples: IntArray
    bad: IntArray


class RequestMaker:
    """Reads and checks the samples at given positions, and replaces bad ones; a pure function of positions and files.

    Args:
        readers: number of threads that read files, one chunk each at a time.
        regions: decode only the part of a large JPEG that its views show.

    Raises:
        UserError: only parts of the images are stored, and the views need more.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        augmentation: Augmentation,
        *,
        views: int,
        quarantine: Quarantine,
        readers: int,
        regions: bool = False,
    ) -> None:
        for check in index.geometry_checks:
            check(augmentation.geometry)
        self.index, self._order = index, order
        self._augmentation, self._views = augmentation, views
        self._regions = regions
        self.quarantine = quarantine
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="read")
        self._stopped = False

    def start(self, positions: IntArray) -> Future[Chunk]:
        """Start `chunk` in the next free reader thread."""
        return self._pool.submit(self.chunk, positions)

    def chunk(self, positions: IntArray) -> Chunk:
        """Read the samples at consecutive global `positions` (N,).

        Raises:
            UserError: all substitutes of a position are bad too.
        """
        epochs, places = np.divmod(positions, self._order.length)
        samples = np.empty_like(positions)
        draws: list[list[FloatArray]] = [[] for _ in range(self._views)]
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = self._order.samples(epoch, places[here])
            for view, tables in enumerate(draws):
                tables.append(
                    draw_view(self._augmentation, seed=self._order.seed, epoch=epoch, view=view, places=places[here])
                )
        tables = [np.concatenate(parts) for parts in draws]
        wanted = zip(epochs.tolist(), places.tolist(), samples.tolist(), self._read_at_once(samples), strict=True)
        bad: list[int] = []
        read = [
            (sample, file) if file is not None else self._read_good(epoch, place, sample, bad)
            for epoch, place, sample, file in wanted
        ]
        used = np.array([sample for sample, _ in read], dtype=np.int64)
        files = [file for _, file in read]
        plan = plan_views(
            np.array([file.size_px for file in files], np.int64),
            np.array([file.orientation for file in files], np.int64),
            self.index.box_px[used],
            tables,
            self._augmentation.geometry,
            mirror=None if self.index.mirror is None else self.index.mirror[used],
            croppable=np.array([file.is_jpeg for file in files]) if self._regions else None,
        )
        return Chunk(Request([file.encoded for file in files], plan), positions, used, np.array(bad, np.int64))

    def _read_at_once(self, samples: IntArray) -> Sequence[ImageFile | None]:
        """Read, in one call, all samples that are valid JPEGs in files of their own. Most samples are."""
        if self.index.store is not None:
            return [None] * len(samples)
        paths = [f"{self.index.root}/{self.index.paths[sample]}" for sample in samples.tolist()]
        read = read_sound_jpegs(paths)
        return [
            None if sample in self.quarantine else file for sample, file in zip(samples.tolist(), read, strict=True)
        ]

    def _read_good(self, epoch: int, place: int, sample: int, bad: list[int]) -> tuple[int, ImageFile]:
        """Read the sample, or else its first usable substitute; bad ones are added to `bad`."""
        file = self._read(sample)
        if file is not None:
            return sample, file
        bad.append(sample)
        for substitute in self._order.substitutes(epoch, place, SUBSTITUTE_ATTEMPTS).tolist():
            file = self._read(substitute)
            if file is not None:
                return substitute, file
            bad.append(substitute)
        raise UserError(
            f"{self.index.root}: {SUBSTITUTE_ATTEMPTS} images drawn in a row cannot be used, the last of them "
            f"{self.index.path(substitute)} ({self.quarantine.reasons[substitute]}); {len(self.quarantine)} are "
            "known to be bad. 'python cli.py check-data' lists all of them: mend or replace these files."
        )

    def _read(self, sample: int) -> ImageFile | None:
        """Read a file; None if it is bad."""
        if self._stopped:
            raise RuntimeError("the loader is closed")
        if sample in self.quarantine:
            return None
        try:
            return check_image(self.index.read(sample))
        except (OSError, BadImage) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self.quarantine.add(sample, self.index.path(sample), reason)
        return None

    def stop(self) -> None:
        """Tell the readers to end, without waiting for them."""
        self._stopped = True

    def close(self) -> None:
        """Stop the readers."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)

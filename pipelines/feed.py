"""From places in the global order to what the DALI graph is fed with; bad files are replaced on the way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import UserError
from pipelines.draws import (
    NO_APPEARANCE,
    AppearanceConfig,
    ColourConfig,
    FloatArray,
    GeometryConfig,
    IntArray,
    draw_view,
)
from pipelines.files import BadImage, check_image
from pipelines.index import Index
from pipelines.order import Order
from pipelines.reading import read_sound_jpegs
from pipelines.regions import find_regions
from pipelines.views import Encoded, Request

log = logging.getLogger(__name__)

SUBSTITUTE_ATTEMPTS = 64
"""After so many bad substitutes in a row the source is taken to be broken as a whole."""


class Quarantine:
    """Samples that cannot be used, each named once; safe to use from several threads.

    Args:
        quiet: name none, for whoever tells of all of them at the end.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, sample: int) -> bool:
        return sample in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, sample: int, path: Path, reason: str) -> None:
        """Remember a sample as bad and say so, once."""
        with self._lock:
            if sample in self._reasons:
                return
            self._reasons[sample] = reason
        if not self._quiet:
            log.warning("%s cannot be used (%s): another image takes its place", path, reason)

    @property
    def reasons(self) -> dict[int, str]:
        """Row of the index -> reason."""
        with self._lock:
            return dict(self._reasons)


@dataclass(frozen=True)
class Chunk:
    """A request and what it stands for: (N,) positions, the (N,) samples that were really read, the bad ones met."""

    request: Request
    positions: IntArray
    samples: IntArray
    bad: IntArray


class Feed:
    """Reads, checks and substitutes the samples of any positions: a pure function of them and of the files.

    Args:
        index: the samples.
        order: which of them stands where.
        geometry: ranges of the affine map.
        colour: ranges of the colour jitter.
        seed: the run's seed.
        views: views per sample.
        quarantine: grows with what turns out to be bad.
        readers: threads that read files, each a chunk at a time.
        appearance: the further augmentations.
        regions: find out which part of each image the views reach.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        geometry: GeometryConfig,
        colour: ColourConfig,
        *,
        seed: int,
        views: int,
        quarantine: Quarantine,
        readers: int,
        appearance: AppearanceConfig = NO_APPEARANCE,
        regions: bool = False,
    ) -> None:
        self.index, self._order = index, order
        self._geometry, self._colour, self._appearance = geometry, colour, appearance
        self._seed, self._views, self._regions = seed, views, regions
        self.quarantine = quarantine
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="read")

    def start(self, positions: IntArray) -> Future[Chunk]:
        """`chunk`, by the next free reader: as many chunks are read at once as there are readers."""
        return self._pool.submit(self.chunk, positions)

    def chunk(self, positions: IntArray) -> Chunk:
        """Read what stands at `positions` (N,), which are consecutive in the run's global order.

        Raises:
            UserError: if even the substitutes of a position cannot be used.
        """
        epochs, places = np.divmod(positions, self._order.length)
        samples = np.empty_like(positions)
        draws: list[list[FloatArray]] = [[] for _ in range(self._views)]
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = self._order.samples(epoch, places[here])
            for view, tables in enumerate(draws):
                tables.append(
                    draw_view(
                        self._geometry,
                        self._colour,
                        self._appearance,
                        seed=self._seed,
                        epoch=epoch,
                        view=view,
                        positions=places[here],
                    )
                )
        wanted = zip(epochs.tolist(), places.tolist(), samples.tolist(), self._read_at_once(samples), strict=True)
        bad: list[int] = []
        read = [
            (sample, data) if data is not None else self._read_good(epoch, place, sample, bad)
            for epoch, place, sample, data in wanted
        ]
        used = np.array([sample for sample, _ in read], dtype=np.int64)
        encoded = [data for _, data in read]
        mirror = None if self.index.mirror is None else self.index.mirror[used]
        box_px, tables = self.index.box_px[used], [np.concatenate(parts) for parts in draws]
        regions = find_regions(encoded, box_px, tables, self._geometry, mirror) if self._regions else None
        request = Request(encoded, box_px, tables, mirror, regions)
        return Chunk(request, positions, used, np.array(bad, np.int64))

    def _read_at_once(self, samples: IntArray) -> Sequence[Encoded | None]:
        """The bytes of those samples that are sound JPEGs in files of their own, as nearly all are in most datasets."""
        if self.index.store is not None:
            return [None] * len(samples)
        known = self.quarantine.reasons
        paths = [f"{self.index.root}/{self.index.paths[sample]}" for sample in samples.tolist()]
        read = read_sound_jpegs(paths)
        return [None if sample in known else data for sample, data in zip(samples.tolist(), read, strict=True)]

    def _read_good(self, epoch: int, place: int, sample: int, bad: list[int]) -> tuple[int, Encoded]:
        """The sample itself or its first usable substitute; what cannot be used goes into `bad`."""
        data = self._read(sample)
        if data is not None:
            return sample, data
        bad.append(sample)
        for substitute in self._order.substitutes(epoch, place, SUBSTITUTE_ATTEMPTS):
            data = self._read(int(substitute))
            if data is not None:
                return int(substitute), data
            bad.append(int(substitute))
        raise UserError(
            f"{self.index.root}: {SUBSTITUTE_ATTEMPTS} images drawn in a row cannot be used, the last of them "
            f"{self.index.path(int(substitute))}; {len(self.quarantine)} are known to be bad. Check the folder."
        )

    def _read(self, sample: int) -> Encoded | None:
        """The file's bytes, or None if it is, or turns out to be, bad."""
        if sample in self.quarantine:
            return None
        try:
            data = np.frombuffer(self.index.read(sample), np.uint8)
            check_image(data)
        except OSError as error:
            self.quarantine.add(sample, self.index.path(sample), error.strerror or str(error))
            return None
        except BadImage as error:
            self.quarantine.add(sample, self.index.path(sample), str(error))
            return None
        return data

    def close(self) -> None:
        """Stop the readers."""
        self._pool.shutdown(cancel_futures=True)

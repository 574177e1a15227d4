"""The stages that make a chunk's samples and files out of its positions: which sample, its bytes, or a substitute's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.check import check_image, read_sound_jpegs
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.samples.index import Bytes, Index, Partners
from peclr_dali.pipelines.samples.order import Order
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import join_plans, plan_views

log = logging.getLogger(__name__)

SUBSTITUTE_ATTEMPTS = 64
"""Number of bad substitutes in a row after which the run stops: the whole source is probably broken."""

CLOSED = "the loader is closed; make another one"


class Quarantine:
    """Samples that cannot be used. Each is logged once. Several threads may use it."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, sample: int) -> bool:
        return sample in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, sample: int, location: str, reason: str) -> None:
        """Add a bad sample, and log it if it is new."""
        with self._lock:
            if sample in self._reasons:
                return
            self._reasons[sample] = reason
        log.warning("%s cannot be used (%s): another image takes its place", location, reason)

    @property
    def reasons(self) -> dict[int, str]:
        """Row of the index -> reason."""
        with self._lock:
            return dict(self._reasons)


class Reader:
    """Reads and checks files, and replaces bad ones; a pure function of positions and files.

    Args:
        quarantine: bad samples; new ones are added.
        stop: when it is set, no further file is read.
        partners: each row then holds a second image, one of the first's partners.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        quarantine: Quarantine,
        stop: threading.Event,
        partners: Partners | None = None,
    ) -> None:
        self._index, self._order, self._quarantine, self._stop = index, order, quarantine, stop
        self._partners = partners

    def read(self, chunk: Chunk) -> Chunk:
        """Add the samples at the positions, their files, their partners, and the bad samples found on the way.

        Raises:
            UserError: all substitutes of a position are bad too.
            RuntimeError: `stop` was set.
        """
        wanted = self._order.samples_at(chunk.positions)
        samples, bad = wanted.copy(), list[int]()
        files = []
        for row, file in enumerate(self._read_many(wanted)):
            if file is None:
                samples[row], file = self._read_good(int(chunk.positions[row]), int(wanted[row]), bad)
            files.append(file)
        if self._partners is not None:
            seconds, of_seconds = self._read_partners(self._partners, chunk.positions, samples, files, bad)
            samples, files = np.concatenate([samples, seconds]), [*files, *of_seconds]
        return replace(chunk, samples=samples, bad=np.array(bad, np.int64), files=files)

    def _read_partners(
        self, partners: Partners, positions: IntArray, samples: IntArray, files: Sequence[ImageFile], bad: list[int]
    ) -> tuple[IntArray, list[ImageFile]]:
        """The second images: of each sample the partner that is drawn, the next usable one, or itself."""
        drawn = self._order.partner_draws(positions)
        chosen, made = partners.of(samples, drawn), []
        for row, found in enumerate(self._read_many(chosen)):
            file = found
            for attempt in range(0 if file else min(int(partners.count[samples[row]]), SUBSTITUTE_ATTEMPTS)):
                chosen[[row]] = partners.of(samples[[row]], drawn[[row]], attempt)
                file = self._read(int(chosen[row]))
                if file is not None:
                    break
                bad.append(int(chosen[row]))
            if file is None:
                chosen[row], file = samples[row], files[row]
            made.append(file)
        return chosen, made

    def _read_many(self, samples: IntArray) -> Sequence[ImageFile | None]:
        """Read samples in one call. None for a bad one; of files of their own, for all that are not valid JPEGs."""
        rows, index = samples.tolist(), self._index
        if index.store is None:
            files = read_sound_jpegs([f"{index.root}/{index.paths[sample]}" for sample in rows])
        else:
            files = [self._checked(sample, data) for sample, data in zip(rows, index.read_many(rows), strict=True)]
        return [None if sample in self._quarantine else file for sample, file in zip(rows, files, strict=True)]

    def _read_good(self, position: int, sample: int, bad: list[int]) -> tuple[int, ImageFile]:
        """Read the sample, or else its first usable substitute; bad ones are added to `bad`."""
        file = self._read(sample)
        if file is not None:
            return sample, file
        bad.append(sample)
        for substitute in self._order.substitutes(*divmod(position, self._order.length), SUBSTITUTE_ATTEMPTS).tolist():
            file = self._read(substitute)
            if file is not None:
                return substitute, file
            bad.append(substitute)
        raise UserError(
            f"{self._index.root}: {SUBSTITUTE_ATTEMPTS} images drawn in a row cannot be used, the last of them "
            f"{self._index.location(bad[-1])} ({self._quarantine.reasons[bad[-1]]}); {len(self._quarantine)} are "
            "known to be bad. 'python cli.py check-data' lists all of them: mend or replace these files."
        )

    def _read(self, sample: int) -> ImageFile | None:
        """Read a file; None if it is bad."""
        if self._stop.is_set():
            raise RuntimeError(CLOSED)
        if sample in self._quarantine:
            return None
        (data,) = self._index.read_many([sample])
        return self._checked(sample, data)

    def _checked(self, sample: int, data: Bytes) -> ImageFile | None:
        """The file, if its bytes could be read and it is sound; else it is added to the bad ones."""
        try:
            if isinstance(data, OSError):
                raise data
            return check_image(data)
        except (OSError, BadImage) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._quarantine.add(sample, self._index.location(sample), reason)
        return None


def plan_chunk(
    chunk: Chunk, *, index: Index, order: Order, augmentations: Sequence[Augmentation], settings: Settings
) -> Chunk:
    """Add the plan: draws, matrices, halvings and regions. The draws are those of the positions and views."""
    epochs, halves = order.epochs(chunk.positions), chunk.halves
    plans = []
    for number, half in enumerate(halves):
        views = range(len(augmentations))[number :: len(halves)]
        samples, files = chunk.samples[half], chunk.files[half]
        draws = [
            np.concatenate([
                draw_view(augmentations[view], seed=order.seed, epoch=epoch, view=view, places=places)
                for epoch, places in epochs
            ])
            for view in views
        ]  # fmt: skip
        plans.append(
            plan_views(
                np.array([file.size_px for file in files], np.int64),
                np.array([file.orientation for file in files], np.int64),
                index.box_px[samples],
                draws,
                [augmentations[view].geometry for view in views],
                mirror=None if index.mirror is None else index.mirror[samples],
                croppable=np.array([file.is_jpeg for file in files]) if settings.regions else None,
            )
        )
    return replace(chunk, plan=join_plans(plans))

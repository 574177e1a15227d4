"""The first stage: from positions to samples and their checked files, or to substitutes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.check import check_image, read_sound_jpegs
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.loader.quarantine import Quarantine
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.samples.index import Bytes, Index, Partners
from peclr_dali.pipelines.samples.order import Order

SUBSTITUTE_ATTEMPTS = 64
"""Number of bad substitutes in a row after which the run stops: the whole source is probably broken."""

CLOSED = "the loader is closed; make another one"


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

    def read(self, positions: IntArray) -> Chunk:
        """The samples at N positions, their files, their partners, and the bad samples found on the way.

        The chunk has M = N images; with partners M = 2 N, first those at the positions, then their partners.

        Raises:
            UserError: all substitutes of a position are bad too.
            RuntimeError: `stop` was set.
        """
        samples, bad = self._order.samples_at(positions), list[int]()
        files = []
        for row, file in enumerate(self._read_many(samples)):
            if file is None:
                samples[row], file = self._read_good(int(positions[row]), int(samples[row]), bad)
            files.append(file)
        chunk = Chunk(positions, samples, files=files)
        if self._partners is not None:
            chunk = self._add_partners(chunk, self._partners, bad)
        return replace(chunk, bad=np.array(bad, np.int64))

    def _add_partners(self, chunk: Chunk, partners: Partners, bad: list[int]) -> Chunk:
        """Add the second images: of each sample the partner that is drawn, the next usable one, or itself."""
        drawn = self._order.partner_draws(chunk.positions)
        samples, files = partners.of(chunk.samples, drawn), list[ImageFile]()
        for row, (first, drawn_file) in enumerate(zip(chunk.files, self._read_many(samples), strict=True)):
            file = drawn_file
            attempts = min(int(partners.count[chunk.samples[row]]), SUBSTITUTE_ATTEMPTS)
            for attempt in range(attempts):
                if file is not None:
                    break
                samples[[row]] = partners.of(chunk.samples[[row]], drawn[[row]], attempt)
                file = self._read(int(samples[row]))
                if file is None:
                    bad.append(int(samples[row]))
            if file is None:
                samples[row], file = chunk.samples[row], first
            files.append(file)
        return replace(chunk, samples=np.concatenate([chunk.samples, samples]), files=[*chunk.files, *files])

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
            f"{self._index.path(bad[-1])} ({self._quarantine.reasons[bad[-1]]}); {len(self._quarantine)} are "
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
            self._quarantine.add(sample, self._index.path(sample), reason)
        return None

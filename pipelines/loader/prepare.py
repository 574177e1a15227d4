"""The stages before DALI, which run in threads: files are read, or substitutes and partners, and views are planned."""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import FloatArray, IntArray
from peclr_dali.pipelines.files.check import check_image, read_sound_jpegs
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Order
from peclr_dali.pipelines.samples.partners import Partners
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import Chunk, plan_views

SUBSTITUTE_ATTEMPTS = 64
"""Number of bad substitutes in a row after which the run stops: the whole source is probably broken."""

CLOSED = "the loader is closed; make another one"

log = logging.getLogger(__name__)


class Quarantine:
    """Samples that cannot be used. Each is logged once. Several threads may use it.

    Attributes:
        reasons: row of the index -> reason.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def add(self, sample: int, location: str, reason: str) -> None:
        """Add a bad sample, and log it if it is new."""
        with self._lock:
            if sample in self.reasons:
                return
            self.reasons[sample] = reason
        log.warning("%s cannot be used (%s): another image takes its place", location, reason)


@dataclass(frozen=True)
class Reader:
    """Reads files, and replaces those that cannot be used; what it gives is a pure function of positions and files.

    Attributes:
        index: the samples. If they have partners, each row holds a second image, one of the first's partners.
        quarantine: the samples that cannot be used; new ones are added.
        stop: when it is set, no further file is read.
    """

    index: Index
    order: Order
    quarantine: Quarantine
    stop: threading.Event

    def read_files(self, samples: Sequence[int]) -> list[ImageFile | None]:
        """The files of some samples, in one call; None for those that cannot be used.

        Raises:
            UserError: the machine is at fault, and not a file.
            RuntimeError: `stop` was set.
        """
        if self.stop.is_set():
            raise RuntimeError(CLOSED)
        files: dict[int, ImageFile | None] = {}
        if self.index.store is None:  # most files are JPEGs: these are read without Python's lock
            jpegs = read_sound_jpegs([f"{self.index.root}/{self.index.paths[sample]}" for sample in samples])
            files = {sample: file for sample, file in zip(samples, jpegs, strict=True) if file is not None}
        bad = self.quarantine.reasons
        left = [sample for sample in dict.fromkeys(samples) if sample not in files and sample not in bad]
        for sample, data in zip(left, self.index.read_many(left), strict=True):
            try:
                if isinstance(data, OSError):
                    raise data
                files[sample] = check_image(data)
            except (OSError, BadImage) as error:
                self.quarantine.add(sample, self.index.location(sample), getattr(error, "strerror", None) or str(error))
        return [None if sample in bad else files[sample] for sample in samples]

    def add_files(self, chunk: Chunk) -> Chunk:
        """Add the files of N samples, which are those at the chunk's positions, and what was bad.

        The chunk then has M = N images; with partners M = 2 N, first the given ones, then their partners.

        Raises:
            UserError: all substitutes of a position are bad too.
            RuntimeError: the loader was stopped.
        """
        samples, files, bad = chunk.samples.copy(), list[ImageFile](), list[int]()
        for row, file in enumerate(self.read_files(samples.tolist())):
            if file is None:
                samples[row], file = self._substitute(int(chunk.positions[row]), int(samples[row]), bad)
            files.append(file)
        chunk = replace(chunk, samples=samples, files=files)
        if self.index.partners is not None:
            chunk = self._add_partners(chunk, self.index.partners, bad)
        return replace(chunk, bad=np.array(bad, np.int64))

    def _substitute(self, position: int, sample: int, bad: list[int]) -> tuple[int, ImageFile]:
        """The first usable substitute of a bad sample, and its file."""
        substitutes = self.order.substitutes(*divmod(position, self.order.length), SUBSTITUTE_ATTEMPTS)
        usable = self._first_usable([sample, *substitutes.tolist()], bad)
        if usable is not None:
            return usable
        raise UserError(
            f"{self.index.root}: {SUBSTITUTE_ATTEMPTS} images drawn in a row cannot be used, the last of them "
            f"{self.index.location(bad[-1])} ({self.quarantine.reasons[bad[-1]]}); {len(self.quarantine.reasons)} are "
            "known to be bad. 'python cli.py check-data' lists all of them: mend or replace these files."
        )

    def _add_partners(self, chunk: Chunk, partners: Partners, bad: list[int]) -> Chunk:
        """Add the second images: of each sample the partner that is drawn, the next usable one, or itself."""
        drawn = self.order.partner_draws(chunk.positions)
        samples, files = partners.of(chunk.samples, drawn), list[ImageFile]()
        for row, file in enumerate(self.read_files(samples.tolist())):
            if file is None:
                attempts = range(min(int(partners.count[chunk.samples[row]]), SUBSTITUTE_ATTEMPTS))
                others = [partners.of(chunk.samples[[row]], drawn[[row]], attempt).item() for attempt in attempts]
                usable = self._first_usable(others, bad)
                samples[row], file = (chunk.samples[row], chunk.files[row]) if usable is None else usable
            files.append(file)
        return replace(chunk, samples=np.concatenate([chunk.samples, samples]), files=[*chunk.files, *files])

    def _first_usable(self, samples: Iterable[int], bad: list[int]) -> tuple[int, ImageFile] | None:
        """The first sample whose file can be used, and the file; those before it are added to `bad`."""
        for sample in samples:
            (file,) = self.read_files([sample])
            if file is not None:
                return sample, file
            bad.append(sample)
        return None


@dataclass(frozen=True)
class Planner:
    """Plans views: draws, matrices, halvings and regions. The draws are those of the positions and views.

    Attributes:
        augmentations: of each view.
        regions: decode regions of images, where that is faster.
    """

    index: Index
    order: Order
    augmentations: Sequence[Augmentation]
    regions: bool

    def add_plan(self, chunk: Chunk) -> Chunk:
        """Add the plan to a chunk of N rows and M images.

        Where rows hold pairs (M = 2 N), views 0, 2, ... show the first images, and views 1, 3, ... the second ones.
        """
        rows = np.arange(len(chunk.positions))
        images_per_row = len(chunk.files) // len(rows)
        view = np.arange(len(self.augmentations))[:, None]
        mirror = self.index.mirror
        plan = plan_views(
            np.array([file.size_px for file in chunk.files], np.int64),
            np.array([file.orientation for file in chunk.files], np.int64),
            self.index.box_px[chunk.samples],
            [self._draws(number, chunk.positions) for number in range(len(self.augmentations))],
            [augmentation.geometry for augmentation in self.augmentations],
            image=rows + len(rows) * (view % images_per_row),
            mirror=None if mirror is None else mirror[chunk.samples],
            croppable=np.array([file.is_jpeg for file in chunk.files]) if self.regions else None,
        )
        return replace(chunk, plan=plan)

    def _draws(self, view: int, positions: IntArray) -> FloatArray:
        """The draws (N, COLUMNS) of a view at some positions (N,), which may lie in several epochs."""
        augmentation, seed = self.augmentations[view], self.order.seed
        tables = [
            draw_view(augmentation, seed=seed, epoch=epoch, view=view, places=places)
            for epoch, places in self.order.epochs(positions)
        ]
        return np.concatenate(tables)

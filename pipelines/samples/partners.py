"""Which other images may be the second of a pair, and which one is drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import DoubleArray, IntArray
from peclr_dali.pipelines.randomness import Stream, philox

_MOST_CODE: Final = 2**62
_NUMBER: Final = re.compile(r"(\d{1,18})\D*$")
_PHILOX_BLOCK: Final = 4


@dataclass(frozen=True)
class Partners:
    """The admissible partners of N samples.

    Those of sample n lie in `rows[first[n] : first[n] + span[n]]`. Of these, `skip[n]` entries from number
    `skip_from[n]` on are not admissible: the sample itself, and others of the same moment.

    Attributes:
        rows: (M,) int64, rows of the index.
        first, span, skip_from, skip: (N,) int64.
    """

    rows: IntArray
    first: IntArray
    span: IntArray
    skip_from: IntArray
    skip: IntArray

    @property
    def count(self) -> IntArray:
        """Number of admissible partners of each sample, (N,)."""
        return self.span - self.skip

    def of(self, samples: IntArray, drawn: DoubleArray, attempt: int = 0) -> IntArray:
        """The partners (K,) of `samples` (K,): with numbers `drawn` (K,) in [0, 1), each admissible one alike.

        `attempt` counts on from the one that was drawn, around all admissible ones. A sample without partners gets
        itself.
        """
        count = self.count[samples]
        number = (drawn * count).astype(np.int64) + attempt
        after = self.skip_from[samples] + self.skip[samples]
        at = (after + number % np.maximum(count, 1)) % np.maximum(self.span[samples], 1)
        return np.where(count > 0, self.rows[np.where(count > 0, self.first[samples] + at, 0)], samples)

    def select(self, chosen: IntArray) -> Partners:
        """The partners of the samples `chosen` (K,), in this order; partners that are not among them are left out."""
        row_of = np.full(len(self.first), -1)
        row_of[chosen] = np.arange(len(chosen))
        rows = row_of[self.rows]
        before = np.concatenate([[0], np.cumsum(rows >= 0)])  # entries that stay, before each entry
        edges = np.stack([self.first, self.first + self.skip_from, self.first + self.skip_from + self.skip,
                          self.first + self.span])[:, chosen]  # fmt: skip
        first, skip_from, skip_to, end = before[edges]
        return Partners(rows[rows >= 0], first, end - first, skip_from - first, skip_to - skip_from)

    @staticmethod
    def joined(parts: Sequence[Partners | None], counts: Sequence[int]) -> Partners | None:
        """The partners of several sources, whose `counts` rows follow each other; None if none has any."""
        if all(part is None for part in parts):
            return None
        filled = [none_of(count) if part is None else part for part, count in zip(parts, counts, strict=True)]
        rows, entries = np.cumsum([0, *counts]), np.cumsum([0, *(len(part.rows) for part in filled)])
        return Partners(
            np.concatenate([part.rows + start for part, start in zip(filled, rows, strict=False)]),
            np.concatenate([part.first + start for part, start in zip(filled, entries, strict=False)]),
            *(np.concatenate([getattr(part, name) for part in filled]) for name in ("span", "skip_from", "skip")),
        )


def none_of(count: int) -> Partners:
    """`count` samples without partners."""
    none = np.zeros(count, np.int64)
    return Partners(np.empty(0, np.int64), none, none, none, none)


def draw_partners(seed: int, epoch: int, places: IntArray) -> DoubleArray:
    """Uniform numbers (N,) in [0, 1) that choose the partners at `places` (N,) of an epoch."""
    drawn = np.empty(len(places))
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(places)], strict=True):
        bits = philox(seed, Stream.PARTNER, epoch=epoch)
        bits.advance(int(places[start]))  # a block for each place
        drawn[start:stop] = np.random.Generator(bits).random(_PHILOX_BLOCK * (stop - start))[::_PHILOX_BLOCK]
    return drawn


def of_same_group(group: IntArray) -> Partners:
    """Partners are the other samples with the same number in `group` (N,)."""
    order = np.argsort(group, kind="stable")
    in_order = group[order]
    first, end = (np.searchsorted(in_order, group, side) for side in ("left", "right"))
    at = np.empty(len(group), np.int64)
    at[order] = np.arange(len(group))
    return Partners(order, first, end - first, at - first, np.ones(len(group), np.int64))


def near_in_time(sequence: IntArray, frame: IntArray, most: int) -> Partners:
    """Partners are other frames of the same sequence, at most `most` away: `sequence` and `frame` are (N,)."""
    earliest = np.full(int(sequence.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, sequence, frame)
    after = frame - earliest[sequence]
    width = int(after.max(initial=0)) + 2 * most + 1
    if width * len(earliest) > _MOST_CODE:
        raise UserError(f"frames of one sequence are up to {width} apart, in {len(earliest)} sequences: too far")
    moment = sequence * width + after + most
    order = np.argsort(moment, kind="stable")
    in_order = moment[order]
    first, same, other = (np.searchsorted(in_order, at) for at in (moment - most, moment, moment + 1))
    end = np.searchsorted(in_order, moment + most, "right")
    return Partners(order, first, end - first, same - first, other - same)


def frames_of(paths: Sequence[str], mirrored: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """The sequences and frame numbers (N,) of images, from their names, such as "VIDEO/frame_000030.jpg".

    A sequence is a folder, for left hands and right ones apart; a frame's number is the last one in the file's name.

    Raises:
        UserError: a file has no number.
    """
    folders: dict[tuple[str, bool], int] = {}
    sequence, frame = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
    for row, (path, left) in enumerate(zip(paths, mirrored.tolist(), strict=True)):
        folder, _, name = path.rpartition("/")
        number = _NUMBER.search(name.rpartition(".")[0])
        if number is None:
            raise UserError(
                f"data.positive = 'time': {path} has no frame number; expected names such as VIDEO/frame_000030.jpg. "
                "Rename the frames, or choose another data.positive"
            )
        sequence[row], frame[row] = folders.setdefault((folder, left), len(folders)), int(number[1])
    return sequence, frame


def tracks_of(sequence: IntArray, frame: IntArray, box_px: npt.NDArray[np.float32], most: int) -> IntArray:
    """The tracks (N,) of hands with boxes (N, 3): their sequences, divided where a frame has several hands.

    In such a sequence a track goes on with the nearest box of a frame at most `most` away, nearest pairs first, if the
    centres are no further apart than the box's side.
    """
    track, tracks = sequence.copy(), int(sequence.max(initial=-1)) + 1
    order = np.lexsort([frame, sequence])
    begins = (np.diff(sequence[order], prepend=-1) != 0) | (np.diff(frame[order], prepend=-1) != 0)
    order = order[np.isin(sequence[order], sequence[order[~begins]])]  # sequences with several hands in a frame
    starts = np.flatnonzero((np.diff(sequence[order]) != 0) | (np.diff(frame[order]) != 0)) + 1
    last = order[:0]  # of each track
    for hands in np.split(order, starts) if len(order) else ():
        last = last[(sequence[last] == sequence[hands[0]]) & (frame[last] >= frame[hands[0]] - most)]
        far_px = np.linalg.norm(box_px[last, None, :2] - box_px[hands, :2], axis=2)
        far_px[far_px > box_px[hands, 2]] = np.inf
        track[hands] = np.arange(tracks, tracks + len(hands))
        tracks += len(hands)
        while np.isfinite(far_px).any():
            of_last, of_hands = np.unravel_index(far_px.argmin(), far_px.shape)
            track[hands[of_hands]] = track[last[of_last]]
            far_px[of_last] = far_px[:, of_hands] = np.inf
        last = np.concatenate([last[~np.isin(track[last], track[hands])], hands])
    return track


def of_pairs(pairs: IntArray, count: int) -> Partners:
    """Partners from pairs (P, 2) of rows, the second a partner of the first, of `count` samples."""
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    first, end = (np.searchsorted(pairs[:, 0], np.arange(count), side) for side in ("left", "right"))
    none = np.zeros(count, np.int64)
    return Partners(pairs[:, 1].copy(), first, end - first, none, none)

"""The admissible second images of pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peclr_dali.pipelines.arrays import DoubleArray, IntArray


@dataclass(frozen=True)
class Partners:
    """The admissible partners of N samples. Those of sample n are `rows[first[n] : first[n] + count[n]]`.

    Attributes:
        rows: (M,) int64, rows of the index.
        first, count: (N,) int64.
    """

    rows: IntArray
    first: IntArray
    count: IntArray

    def of(self, samples: IntArray, drawn: DoubleArray, attempt: int = 0) -> IntArray:
        """The partners (K,) of `samples` (K,): with numbers `drawn` (K,) in [0, 1), each admissible one alike.

        `attempt` counts on from the one that was drawn, around all admissible ones. A sample without partners gets
        itself.
        """
        partners = samples.copy()
        some = np.flatnonzero(self.count[samples])
        count = self.count[samples[some]]
        number = (drawn[some] * count).astype(np.int64) + attempt
        partners[some] = self.rows[self.first[samples[some]] + number % count]
        return partners

    def select(self, chosen: IntArray) -> "Partners":
        """The partners of the samples `chosen` (K,), in this order; partners that are not among them are left out."""
        row_of = np.full(len(self.first), -1)
        row_of[chosen] = np.arange(len(chosen))
        rows = row_of[self.rows]
        before = np.concatenate([[0], np.cumsum(rows >= 0)])  # entries that stay, before each entry
        first, end = before[self.first[chosen]], before[(self.first + self.count)[chosen]]
        return Partners(rows[rows >= 0], first, end - first)

    @staticmethod
    def joined(parts: "Sequence[Partners | None]", counts: Sequence[int]) -> "Partners | None":
        """The partners of several sources, whose `counts` rows follow each other; None if none has any."""
        if all(part is None for part in parts):
            return None
        no_pairs = np.empty((0, 2), np.int64)
        filled = [
            of_pairs(no_pairs, count) if part is None else part for part, count in zip(parts, counts, strict=True)
        ]
        rows, entries = np.cumsum([0, *counts]), np.cumsum([0, *(len(part.rows) for part in filled)])
        return Partners(
            np.concatenate([part.rows + start for part, start in zip(filled, rows, strict=False)]),
            np.concatenate([part.first + start for part, start in zip(filled, entries, strict=False)]),
            np.concatenate([part.count for part in filled]),
        )


def of_same_group(group: IntArray) -> Partners:
    """Partners are the other samples with the same number in `group` (N,): those behind a sample, then from the first.

    All pairs are in memory: groups are small, such as the four versions of a pose.
    """
    order = np.argsort(group, kind="stable")
    in_order = group[order]
    first, end = (np.searchsorted(in_order, in_order, side) for side in ("left", "right"))
    sample = np.repeat(np.arange(len(group)), end - first - 1)  # in the order of `order`, as all below
    start = np.cumsum(end - first - 1) - (end - first - 1)
    behind = 1 + np.arange(len(sample)) - start[sample]
    at = first[sample] + (sample - first[sample] + behind) % (end - first)[sample]
    return of_pairs(np.stack([order[sample], order[at]], axis=1), len(group))


def of_pairs(pairs: IntArray, count: int) -> Partners:
    """Partners from pairs (P, 2) of rows, the second a partner of the first, of `count` samples."""
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    first, end = (np.searchsorted(pairs[:, 0], np.arange(count), side) for side in ("left", "right"))
    return Partners(pairs[:, 1].copy(), first, end - first)

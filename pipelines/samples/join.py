"""Joins the indices of several sources into one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.arrays import DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.randomness import Stream, uniforms
from peclr_dali.pipelines.samples.index import Bytes, Index, SourceRows, Store


def join(indices: Sequence[Index], weights: Sequence[float]) -> Index:
    """Join at least one index: the rows of the first, then those of the second, and so on.

    A source's share of a batch is its weight over the sum of all weights.

    Keypoints of a source without any are NaN. If all sources have keypoints, missing targets "K" and "xyz_m" are NaN
    too. Other targets are kept only if all sources have them.
    """
    if len(indices) == 1:
        return indices[0]
    root, folders = _common_root([str(index.root) for index in indices])
    counts = [len(index) for index in indices]
    return Index(
        name=" + ".join(index.name for index in indices),
        root=Path(root),
        paths=[f"{folder}/{path}" for folder, index in zip(folders, indices, strict=True) for path in index.paths],
        box_px=np.concatenate([index.box_px for index in indices]),
        keypoints_px=_join_tables([index.keypoints_px for index in indices], counts),
        mirror=_join_tables([index.mirror for index in indices], counts, missing=False),
        group=_join_groups(indices),
        targets=_join_targets(indices, counts),
        sources=tuple(
            SourceRows(index.name, len(index), weight) for index, weight in zip(indices, weights, strict=True)
        ),
        store=_JoinedStore(indices) if any(index.store is not None for index in indices) else None,
        partners=Partners.joined([index.partners for index in indices], counts),
    )


class _JoinedStore(Store):
    """The rows of several sources, one after the other; each source reads its own in one call."""

    def __init__(self, indices: Sequence[Index]) -> None:
        self._indices = indices
        self._first = [0, *accumulate(len(index) for index in indices)]

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        read: dict[int, Bytes] = {}
        for index, first, end in zip(self._indices, self._first, self._first[1:], strict=False):
            own = [row for row in rows if first <= row < end]
            if own:
                read |= zip(own, index.read_many([row - first for row in own]), strict=True)
        return [read[row] for row in rows]


def _common_root(roots: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that holds all roots, and each root relative to it. If one is an address: "", and the full roots."""
    if any("://" in root for root in roots):
        return "", [root if "://" in root else os.path.abspath(root) for root in roots]  # noqa: PTH100
    absolute = [os.path.abspath(root) for root in roots]  # noqa: PTH100  links stay as they are
    common = os.path.commonpath(absolute)
    return common, [os.path.relpath(root, common) for root in absolute]


def _join_targets(indices: Sequence[Index], counts: Sequence[int]) -> dict[str, FloatArray]:
    """Join the targets that all sources have, and "K" and "xyz_m" if all have keypoints and one has the target."""
    shared = [name for name in indices[0].targets if all(name in index.targets for index in indices)]
    with_keypoints = ["K", "xyz_m"] if all(index.keypoints_px is not None for index in indices) else []
    names = dict.fromkeys(with_keypoints + shared)
    tables = {name: _join_tables([index.targets.get(name) for index in indices], counts) for name in names}
    return {name: table for name, table in tables.items() if table is not None}


def _join_tables(
    tables: Sequence[npt.NDArray[Any] | None], counts: Sequence[int], *, missing: float = np.nan
) -> npt.NDArray[Any] | None:
    """Concatenate tables. A table that is None is filled with `missing`; the result is None if all are None."""
    known = next((table for table in tables if table is not None), None)
    if known is None:
        return None
    return np.concatenate([
        np.full((count, *known.shape[1:]), missing, known.dtype) if table is None else table
        for table, count in zip(tables, counts, strict=True)
    ])  # fmt: skip


def _join_groups(indices: Sequence[Index]) -> IntArray | None:
    """Join the groups; groups of different sources stay different."""
    if all(index.group is None for index in indices):
        return None
    groups, first = [], 0
    for index in indices:
        group = np.unique(index.groups, return_inverse=True)[1]
        groups.append(group + first)
        first += int(group.max(initial=-1)) + 1
    return np.concatenate(groups)


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

    def select(self, chosen: IntArray) -> Partners:
        """The partners of the samples `chosen` (K,), in this order; partners that are not among them are left out."""
        row_of = np.full(len(self.first), -1)
        row_of[chosen] = np.arange(len(chosen))
        rows = row_of[self.rows]
        before = np.concatenate([[0], np.cumsum(rows >= 0)])  # entries that stay, before each entry
        first, end = before[self.first[chosen]], before[(self.first + self.count)[chosen]]
        return Partners(rows[rows >= 0], first, end - first)

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
            np.concatenate([part.count for part in filled]),
        )


def none_of(count: int) -> Partners:
    """`count` samples without partners."""
    return of_pairs(np.empty((0, 2), np.int64), count)


def draw_partners(seed: int, epoch: int, places: IntArray) -> DoubleArray:
    """Uniform numbers (N,) in [0, 1) that choose the partners at `places` (N,) of an epoch."""
    return uniforms(seed, Stream.PARTNER, epoch, places, 4)[:, 0]


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

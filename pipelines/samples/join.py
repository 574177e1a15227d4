"""Joins the indices of several sources into one."""

import os
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from peclr_dali.pipelines.arrays import AnyArray, FloatArray, IntArray
from peclr_dali.pipelines.config import is_address
from peclr_dali.pipelines.samples.index import Bytes, Index, SourceRows, Store
from peclr_dali.pipelines.samples.partners import Partners


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
        root=root,
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
    """The folder that holds all roots, and each root relative to it; if one is an address, the roots as they are."""
    full = [root if is_address(root) else os.path.abspath(root) for root in roots]  # noqa: PTH100  links stay
    if any(is_address(root) for root in roots):
        return " + ".join(full), full
    common = os.path.commonpath(full)
    return common, [os.path.relpath(root, common) for root in full]


def _join_targets(indices: Sequence[Index], counts: Sequence[int]) -> dict[str, FloatArray]:
    """Join the targets that all sources have, and "K" and "xyz_m" if all have keypoints and one has the target."""
    shared = [name for name in indices[0].targets if all(name in index.targets for index in indices)]
    with_keypoints = ["K", "xyz_m"] if all(index.keypoints_px is not None for index in indices) else []
    names = dict.fromkeys(with_keypoints + shared)
    tables = {name: _join_tables([index.targets.get(name) for index in indices], counts) for name in names}
    return {name: table for name, table in tables.items() if table is not None}


def _join_tables(
    tables: Sequence[AnyArray | None], counts: Sequence[int], *, missing: float = np.nan
) -> AnyArray | None:
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

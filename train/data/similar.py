"""Finds, for each hand, the most similar hands of other groups, by their keypoints alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.cluster.vq import kmeans2, vq

from peclr_dali.machine.cores import available_cores
from peclr_dali.pipelines.arrays import IntArray

Floats = npt.NDArray[np.float32]

COMPONENTS: Final = 14
"""Principal components in which hands are compared."""
EXACT_UP_TO: Final = 100_000
"""Up to so many hands, all are compared with all. More are divided into cells."""
PER_CELL: Final = 1000
PROBED: Final = 64
"""A hand is compared with the hands of so many cells: those whose centres are nearest to its own cell's."""
CHECKED: Final = 1000
"""Hands whose nearest is also looked for among all, which tells how often the cells miss it."""
_BLOCK: Final = 2**22
"""Distances that are held at a time."""


class Similar(NamedTuple):
    """The partners of N hands.

    Attributes:
        rows: (N, count) int64, the most similar first; -1 where the other groups have no more hands.
        found: share of `CHECKED` hands whose first partner is the nearest of all; 1 where all are compared with all.
    """

    rows: IntArray
    found: float


def shapes_of(keypoints_px: Floats, mirrored: npt.NDArray[np.bool_], *, upright: int | None = None) -> Floats:
    """The shapes of hands: keypoints (N, K, 2) without their position and size, left hands as right ones.

    The mean over the keypoints is 0, and the mean of their squared distances from it is 1.

    Args:
        keypoints_px: all are known, and those of a hand are not all at one place.
        mirrored: (N,) hands that are mirrored, left for right.
        upright: a keypoint; each shape is rotated so that this one lies straight below the mean. None: not rotated.
    """
    shapes = keypoints_px - keypoints_px.mean(axis=1, keepdims=True)
    shapes[mirrored, :, 0] *= -1
    shapes /= np.sqrt((shapes**2).sum(axis=2).mean(axis=1))[:, None, None]
    if upright is not None:
        x, y = (shapes[:, upright] / np.linalg.norm(shapes[:, upright], axis=1, keepdims=True).clip(1e-12)).T
        turn = np.stack([y, -x, x, y], axis=1).reshape(-1, 2, 2)
        shapes = shapes @ turn.transpose(0, 2, 1)
    return np.asarray(shapes, np.float32)


def principal_components(shapes: Floats) -> Floats:
    """The first `COMPONENTS` principal components (N, C) of shapes (N, K, 2)."""
    flat = shapes.reshape(len(shapes), -1)
    flat = flat - flat.mean(axis=0)
    _, directions = np.linalg.eigh(flat.T @ flat)  # ascending
    return np.ascontiguousarray(flat @ directions[:, : -COMPONENTS - 1 : -1])


def distances(shapes: Floats, others: Floats) -> Floats:
    """The distances (N,) of shapes (N, K, 2): root mean square over the keypoints, so 1 is the size of a hand."""
    return np.asarray(np.sqrt(((shapes - others) ** 2).sum(axis=2).mean(axis=1)), np.float32)


def most_similar(
    points: Floats, group: IntArray, count: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Similar:
    """The `count` nearest of `points` (N, D) in other groups, for each point; equal distances by their rows.

    With more than `EXACT_UP_TO` points this is approximate: k-means divides them into cells, and a point is compared
    with those of the `PROBED` cells around its own. Where these hold too few points of other groups, more cells are
    taken, at last all.

    Args:
        group: (N,) numbers of the groups; a point's partners are of others than its own.
        progress: called with (points done, points in all).
    """
    total = len(points)
    cells = 1 if total <= EXACT_UP_TO else total // PER_CELL
    _, number, size = np.unique(group, return_inverse=True, return_counts=True)
    wanted = np.minimum(count, total - size[number])  # of a large group, the others may be fewer
    table, numbers = torch.from_numpy(points), torch.from_numpy(number)
    centres, cell_of = _cells(points, cells)
    members = np.split(np.argsort(cell_of, kind="stable"), np.cumsum(np.bincount(cell_of, minlength=cells))[:-1])
    rows = np.full((total, count), -1, np.int64)
    probed, done = min(PROBED, cells), 0
    todo = wanted > 0

    def search(queries: IntArray, near: list[int]) -> int:
        among = np.sort(np.concatenate([members[cell] for cell in near]))
        rows[queries] = _nearest(table, numbers, queries, among, count)
        return len(queries)

    # Each thread computes by itself: torch's own threads would wait for each other at every small operation.
    with ThreadPoolExecutor(available_cores(), initializer=partial(torch.set_num_threads, 1)) as pool:
        while todo.any():
            around = torch.cdist(centres, centres).topk(probed, largest=False).indices
            parts = [
                (part, near.tolist())
                for mine, near in zip(members, around, strict=True)
                for part in np.array_split(mine[todo[mine]], -(-len(mine) // PER_CELL))
                if len(part)
            ]
            for searched in pool.map(search, *zip(*parts, strict=True)):
                done += searched
                progress(min(done, total), total)
            todo = (rows >= 0).sum(axis=1) < wanted
            if probed == cells:
                break
            probed = min(8 * probed, cells)
    return Similar(rows, _share_found(table, numbers, rows) if cells > 1 else 1.0)


def _cells(points: Floats, cells: int) -> tuple[torch.Tensor, IntArray]:
    """The centres (cells, D), and the cell (N,) of each point."""
    rng = np.random.default_rng(0)
    sample = points[rng.choice(len(points), min(50 * cells, len(points)), replace=False)]
    centres = sample[:cells] if cells == 1 else kmeans2(sample, sample[:cells], iter=10, minit="matrix")[0]
    return torch.from_numpy(centres), vq(points, centres)[0].astype(np.int64)


def _nearest(table: torch.Tensor, group: torch.Tensor, queries: IntArray, among: IntArray, count: int) -> IntArray:
    """The rows (Q, count) of the nearest points `among` (M,), ascending, for the points at `queries` (Q,)."""
    candidates, found = torch.from_numpy(among), []
    points, groups = table[candidates].T.contiguous(), group[candidates]
    half = (points**2).sum(dim=0) / 2
    for rows in torch.split(torch.from_numpy(queries), max(1, _BLOCK // len(among))):
        far = torch.addmm(half, table[rows], points, alpha=-1)  # half the squared distance, less the query's part
        far.masked_fill_(group[rows, None] == groups, torch.inf)
        nearest = torch.empty((len(rows), count), dtype=torch.int64)
        for place in range(count):
            least, at = far.min(dim=1)  # the first of equal ones
            nearest[:, place] = candidates[at].where(least < torch.inf, -1)
            far.scatter_(1, at[:, None], torch.inf)
        found.append(nearest)
    return torch.cat(found).numpy()


def _share_found(table: torch.Tensor, group: torch.Tensor, rows: IntArray) -> float:
    """The share of `CHECKED` points whose first partner in `rows` (N, count) is the nearest of all."""
    with_partner = np.flatnonzero(rows[:, 0] >= 0)
    checked = np.random.default_rng(0).permutation(with_partner)[:CHECKED]
    best = _nearest(table, group, checked, np.arange(len(table)), 1)
    far, least = (
        torch.linalg.vector_norm(table[torch.from_numpy(checked)] - table[torch.from_numpy(found)], dim=1)
        for found in (rows[checked, 0], best[:, 0])
    )
    return float((far <= least * 1.001).double().mean())

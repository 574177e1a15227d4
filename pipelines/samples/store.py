"""Stores read samples that are not files of their own. A loader tells them which samples come next."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import numpy as np

from pipelines.arrays import IntArray

Steps = Callable[[], Iterator[IntArray]]
"""Makes an iterator over the rows (N,) of each coming step, of all ranks. Every call begins at the first step."""


def in_order(count: int, each: int) -> list[IntArray]:
    """All of `count` rows in order, as steps of at most `each`."""
    return [np.arange(first, min(first + each, count)) for first in range(0, count, each)]


@dataclass(frozen=True)
class Traffic:
    """What a store with a cache has read so far.

    Attributes:
        images: images read.
        hits: those of them that were in the cache when they were asked for.
        bytes: bytes from the network.
    """

    images: int = 0
    hits: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, astuple(self), astuple(other)))


class Follower:
    """Follows the progress of a loader. This base class does nothing."""

    def done(self) -> None:
        """One more step has been read completely."""

    def close(self) -> None:
        """No further step will be read; whoever waits for a sample gets a RuntimeError."""


class Store:
    """Reads the files of samples, by row."""

    def read(self, row: int) -> bytes:
        """The bytes of a sample's file; any thread may call it.

        Raises:
            OSError: they cannot be read.
        """
        raise NotImplementedError

    def follow(self, steps: Steps) -> Follower:
        """Prepare for these steps in the background. `read` gives the same bytes with and without it."""
        return Follower()

    def traffic(self) -> Traffic | None:
        """Counters; None for a store without a cache."""
        return None


class SelectedStore(Store):
    """Some `rows` (N,) of another store, in this order."""

    def __init__(self, store: Store, rows: IntArray) -> None:
        self._store, self.rows = store, rows

    def read(self, row: int) -> bytes:
        """See `Store`."""
        return self._store.read(int(self.rows[row]))

    def follow(self, steps: Steps) -> Follower:
        """See `Store`."""
        return self._store.follow(lambda: (self.rows[rows] for rows in steps()))

    def traffic(self) -> Traffic | None:
        """See `Store`."""
        return self._store.traffic()


class JoinedStore(Store):
    """The rows of several sources, one after the other.

    Args:
        reads: for each source, the function that reads one of its rows.
        stores: those of the sources; None for files.
        counts: rows of each source.
    """

    def __init__(
        self, reads: Sequence[Callable[[int], bytes]], stores: Sequence[Store | None], counts: Sequence[int]
    ) -> None:
        self._reads, self._stores = reads, stores
        self._first = [0, *accumulate(counts)]

    def read(self, row: int) -> bytes:
        """See `Store`."""
        number = bisect_right(self._first, row) - 1
        return self._reads[number](row - self._first[number])

    def follow(self, steps: Steps) -> Follower:
        """See `Store`."""
        return _Followers([
            store.follow(lambda number=number: self._part(steps, number))  # type: ignore[misc]
            for number, store in enumerate(self._stores)
            if store is not None
        ])  # fmt: skip

    def _part(self, steps: Steps, number: int) -> Iterator[IntArray]:
        """The rows of one source in each step."""
        first, end = self._first[number : number + 2]
        for rows in steps():
            yield rows[(rows >= first) & (rows < end)] - first

    def traffic(self) -> Traffic | None:
        """The sum of all stores."""
        known = [found for store in self._stores if store is not None and (found := store.traffic()) is not None]
        return sum(known[1:], known[0]) if known else None


class _Followers(Follower):
    def __init__(self, followers: Sequence[Follower]) -> None:
        self._followers = followers

    def done(self) -> None:
        for follower in self._followers:
            follower.done()

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

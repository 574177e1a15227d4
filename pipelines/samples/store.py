"""Stores read samples that are not files of their own. A loader tells them which samples come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from peclr_dali.pipelines.arrays import IntArray

Steps = Callable[[], Iterator[IntArray]]
"""Makes an iterator over the rows (N,) of each coming step, of all ranks. Every call begins at the first step."""


def in_order(count: int, each: int) -> list[IntArray]:
    """All of `count` rows in order, as steps of at most `each`."""
    return [np.arange(first, min(first + each, count)) for first in range(0, count, each)]


@dataclass(frozen=True)
class Prefetch:
    """Follows the progress of a loader. The default does nothing.

    Attributes:
        done: called when one more step has been read completely.
        close: called when no further step will be read; whoever waits for a sample gets a RuntimeError.
    """

    done: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


class Store(ABC):
    """Reads the files of samples, by row.

    Attributes:
        is_remote: whether reading a sample may download the shard that holds it.
    """

    is_remote = False

    @abstractmethod
    def read(self, row: int) -> bytes:
        """The bytes of a sample's file; any thread may call it.

        Raises:
            OSError: they cannot be read.
        """

    def prefetch(self, steps: Steps) -> Prefetch:
        """Prepare for these steps in the background. `read` gives the same bytes with and without it."""
        return Prefetch()


class SelectedStore(Store):
    """Some `rows` (N,) of another store, in this order."""

    def __init__(self, store: Store, rows: IntArray) -> None:
        self._store, self.rows, self.is_remote = store, rows, store.is_remote

    def read(self, row: int) -> bytes:
        """See `Store`."""
        return self._store.read(int(self.rows[row]))

    def prefetch(self, steps: Steps) -> Prefetch:
        """See `Store`."""
        return self._store.prefetch(lambda: (self.rows[rows] for rows in steps()))


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
        self.is_remote = any(store is not None and store.is_remote for store in stores)
        self._first = [0, *accumulate(counts)]

    def read(self, row: int) -> bytes:
        """See `Store`."""
        number = bisect_right(self._first, row) - 1
        return self._reads[number](row - self._first[number])

    def prefetch(self, steps: Steps) -> Prefetch:
        """See `Store`."""
        parts = [
            store.prefetch(lambda number=number: self._part(steps, number))  # type: ignore[misc]
            for number, store in enumerate(self._stores)
            if store is not None
        ]

        def done() -> None:
            for part in parts:
                part.done()

        def close() -> None:
            for part in parts:
                part.close()

        return Prefetch(done, close)

    def _part(self, steps: Steps, number: int) -> Iterator[IntArray]:
        """The rows of one source in each step."""
        first, end = self._first[number : number + 2]
        for rows in steps():
            yield rows[(rows >= first) & (rows < end)] - first

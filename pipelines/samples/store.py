"""Stores read samples that are not files of their own, such as those in tar files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from peclr_dali.pipelines.arrays import IntArray

Bytes = bytes | OSError
"""A sample's bytes, or why they cannot be read."""


class Store(ABC):
    """Reads the bytes of samples, by row; any thread may do so."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """The bytes of some samples, in one call."""


class SelectedStore(Store):
    """Some `rows` (N,) of another store, in this order."""

    def __init__(self, store: Store, rows: IntArray) -> None:
        self._store, self._rows = store, rows

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        return self._store.read([int(self._rows[row]) for row in rows])

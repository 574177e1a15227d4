"""Which sample stands at which place of the global order, and which places a rank loads.

Everything here is a pure function of its arguments, so a resume at any step, on any number of ranks, continues the
same run.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from pipelines.draws import IntArray, Stream, philox


class EpochOrder:
    """Every epoch a new shuffle of the same `count` samples; an epoch visits the first `length` of it.

    Args:
        count: samples in the index.
        length: positions in an epoch, at most `count`; the rest of the shuffle sits this epoch out.
        seed: the run's seed.
        shuffle: False keeps the index's order, for evaluation.
    """

    def __init__(self, count: int, length: int, *, seed: int, shuffle: bool = True) -> None:
        if not 0 < length <= count:
            raise ValueError(f"an epoch of {length} positions cannot be drawn from {count} samples without repeating")
        self.count, self.length = count, length
        self._seed, self._shuffle = seed, shuffle
        self._permutations: dict[int, IntArray] = {}
        self._lock = threading.Lock()  # the loader's readers ask at the same time

    def samples(self, epoch: int, positions: IntArray) -> IntArray:
        """Rows of the index at `positions` (N,) of `epoch`: (N,) int64."""
        with self._lock:
            if epoch not in self._permutations:
                # Batches cross from one epoch into the next and never go back further.
                self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
                self._permutations[epoch] = self._permutation(epoch)
            permutation = self._permutations[epoch]
        return permutation[positions]

    def _permutation(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(self.count, dtype=np.int64)
        return np.random.Generator(philox(self._seed, Stream.ORDER, epoch=epoch)).permutation(self.count)

    def substitutes(self, epoch: int, position: int, attempts: int) -> IntArray:
        """Rows that stand in, in this order, for a bad sample at a position: (attempts,) int64."""
        bits = philox(self._seed, Stream.SUBSTITUTE, epoch=epoch)
        bits.advance(position * 4096)  # counters set aside for one position: no two share a number
        return np.random.Generator(bits).integers(self.count, size=attempts)


@dataclass(frozen=True)
class RankSlice:
    """The consecutive rows [start, stop) of every global batch of `batch` samples that one rank loads."""

    batch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def positions(self, step: int) -> IntArray:
        """Positions in the run's global order that the rank loads at `step`: (len(self),) int64."""
        first = step * self.batch
        return np.arange(first + self.start, first + self.stop, dtype=np.int64)

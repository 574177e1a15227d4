"""Defines the sample at each place of an epoch, and the global positions that a rank loads.

A global position counts from the start of the run, a place from the start of its epoch.

Everything here is a pure function of its arguments, so a resume at any step, on any number of ranks, continues the
same run.
"""

import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import DoubleArray, IntArray
from peclr_dali.pipelines.randomness import MOST_VIEWS, Stream, philox, uniforms
from peclr_dali.pipelines.samples.index import Index


def build_order(index: Index, *, batch: int, seed: int) -> "Order":
    """Build the order of a run over an index of one or several sources, at least `batch` samples in all.

    An epoch has as many whole batches as the images fill.

    Raises:
        UserError: a source's weight gives it no row of a batch, or there are too many sources.
    """
    length = len(index) // batch * batch
    if len(index.sources) < 2:
        return EpochOrder(len(index), length, seed=seed)
    if len(index.sources) > MOST_VIEWS:  # the number of a source takes the place of a view's
        raise UserError(f"{len(index.sources)} sources; expected at most {MOST_VIEWS}. Put several into one folder")
    rows = rows_per_batch([source.weight for source in index.sources], batch)
    for number, (source, count) in enumerate(zip(index.sources, rows, strict=True)):
        if count == 0:
            raise UserError(
                f"data.{number}.weight = {source.weight:g} gives {source.name} no row of a batch of {batch}: "
                f"raise the weight or the batch, or leave this source out"
            )
    return MixtureOrder([source.count for source in index.sources], rows, length, seed=seed)


class Order(ABC):
    """The sample at each place of every epoch of `length` places."""

    length: int
    seed: int

    @abstractmethod
    def samples(self, epoch: int, places: IntArray) -> IntArray:
        """The samples (N,) int64, rows of the index, at `places` (N,) of an epoch."""

    @abstractmethod
    def substitutes(self, epoch: int, place: int, attempts: int) -> IntArray:
        """Samples (attempts,) int64 of the same source to try, in this order, in place of a bad one."""

    def epochs(self, positions: IntArray) -> list[tuple[int, IntArray]]:
        """The epochs of ascending global `positions`, with the places of the positions in each."""
        epochs, places = np.divmod(positions, self.length)
        return [(epoch, places[epochs == epoch]) for epoch in np.unique(epochs).tolist()]

    def samples_at(self, positions: IntArray) -> IntArray:
        """The samples (N,) int64 at ascending global `positions` (N,)."""
        return np.concatenate([self.samples(epoch, places) for epoch, places in self.epochs(positions)])

    def partner_draws(self, positions: IntArray) -> DoubleArray:
        """The numbers (N,) that choose the partners at ascending global `positions` (N,)."""
        draws = [
            uniforms(self.seed, Stream.PARTNER, epoch, places, 4)[:, 0] for epoch, places in self.epochs(positions)
        ]
        return np.concatenate(draws)


class EpochOrder(Order):
    """Every epoch is a new shuffle of the same `count` samples, and visits the first `length` of the shuffle.

    Args:
        length: places in an epoch, at most `count`; the rest of the shuffle is not used in this epoch.
        fixed: (length,) samples that every epoch visits in this order; None: shuffle.
    """

    def __init__(self, count: int, length: int, *, seed: int, fixed: IntArray | None = None) -> None:
        self.count, self.length, self.seed = count, length, seed
        self._fixed = fixed
        self._laps = _Laps(count, 0, seed=seed, source=0)

    def samples(self, epoch: int, places: IntArray) -> IntArray:
        """See `Order`."""
        return (self._laps.lap(epoch) if self._fixed is None else self._fixed)[places]

    def substitutes(self, epoch: int, place: int, attempts: int) -> IntArray:
        """See `Order`."""
        return _substitutes(self.seed, epoch, place, self.count, attempts)


class MixtureOrder(Order):
    """The order of several sources. Each source has a fixed number of rows in every batch and its own laps.

    A lap is one pass over a source in a new shuffle. Laps do not end with batches or epochs: a small source has many
    laps in an epoch, a large one may not finish its first. The rows of a source are spread evenly over a batch, so that
    every micro-batch has about the same shares.

    Args:
        counts: samples of each source, one after the other in the index.
        rows: rows of each source in every batch, all positive.
        length: places in an epoch, whole batches.
    """

    def __init__(self, counts: Sequence[int], rows: Sequence[int], length: int, *, seed: int) -> None:
        self._batch = sum(rows)
        self.length, self.seed = length, seed
        self._first = np.cumsum([0, *counts])
        self._rows = np.array(rows, np.int64)
        self._source = interleave(rows)
        self._number = np.empty(self._batch, np.int64)  # of each row of a batch, within its source
        for source, count in enumerate(rows):
            self._number[self._source == source] = np.arange(count)
        self._laps = [
            _Laps(count, own, seed=seed, source=source)
            for source, (count, own) in enumerate(zip(counts, rows, strict=True))
        ]

    def samples(self, epoch: int, places: IntArray) -> IntArray:
        """See `Order`."""
        step, row = np.divmod(epoch * self.length + places, self._batch)
        sources = self._source[row]
        before = step * self._rows[sources] + self._number[row]  # number of earlier rows of the same source
        samples = np.empty_like(places)
        for source in np.unique(sources).tolist():
            here = sources == source
            samples[here] = self._first[source] + self._laps[source].samples(before[here])
        return samples

    def substitutes(self, epoch: int, place: int, attempts: int) -> IntArray:
        """See `Order`."""
        source = self._source[(epoch * self.length + place) % self._batch]
        first, end = (int(edge) for edge in self._first[source : source + 2])
        return _substitutes(self.seed, epoch, place, end - first, attempts) + first


class _Laps:
    """The laps of one source, as one endless order.

    Args:
        apart: rows of the source in a batch. If the source has at least three times as many samples, a lap does not
            begin with any of the last `apart` samples of the lap before: an image that is twice in a batch would be its
            own negative.
    """

    def __init__(self, count: int, apart: int, *, seed: int, source: int) -> None:
        self._count = count
        self._apart = apart if count >= 3 * apart else 0
        self._seed, self._source = seed, source
        self._kept, self._lock = functools.lru_cache(maxsize=4)(self._made), threading.Lock()

    def lap(self, number: int) -> IntArray:
        """The samples (count,) int64 in the order of a lap. Four are kept: those of successive laps."""
        with self._lock:  # each reader thread would make the same shuffle
            return self._kept(number)

    def samples(self, numbers: IntArray) -> IntArray:
        """The samples (N,) int64 at the places `numbers` (N,) of this endless order, in [0, count)."""
        laps, places = np.divmod(numbers, self._count)
        samples = np.empty_like(numbers)
        for lap in np.unique(laps).tolist():
            here = laps == lap
            samples[here] = self.lap(lap)[places[here]]
        return samples

    def _shuffled(self, lap: int) -> IntArray:
        return np.random.Generator(philox(self._seed, Stream.ORDER, epoch=lap, view=self._source)).permutation(
            self._count
        )

    def _made(self, lap: int) -> IntArray:
        order = self._shuffled(lap)
        if lap and self._apart:
            # The end of a lap is never changed, so only the lap before is needed, as it was shuffled.
            just_seen = np.zeros(self._count, bool)
            just_seen[self._shuffled(lap - 1)[-self._apart :]] = True
            early = np.flatnonzero(just_seen[order[: self._apart]])
            later = self._apart + np.flatnonzero(~just_seen[order[self._apart : -self._apart]])[: len(early)]
            order[early], order[later] = order[later], order[early]
        return order


def rows_per_batch(weights: Sequence[float], batch: int) -> list[int]:
    """Divide the rows of a batch by weight.

    Each source gets the whole part of its share; those with the largest remainders get one more. All batches are
    divided alike. A source's number of rows differs from its exact share by less than one.
    """
    shares = np.array(weights, np.float64) * (batch / sum(weights))
    # A share just below a whole number, from rounding, counts as this number.
    rows = np.floor(shares + 1e-9).astype(np.int64)
    most_left = np.argsort(rows - shares, kind="stable")
    rows[most_left[: batch - rows.sum()]] += 1
    return [int(count) for count in rows]


def interleave(rows: Sequence[int]) -> IntArray:
    """The source of each row of a batch, each source spread evenly: (sum(rows),) int64."""
    at = np.concatenate([(np.arange(count) + 0.5) / count for count in rows])
    return np.repeat(np.arange(len(rows)), rows)[np.argsort(at, kind="stable")]


def _substitutes(seed: int, epoch: int, place: int, count: int, attempts: int) -> IntArray:
    bits = philox(seed, Stream.SUBSTITUTE, epoch=epoch)
    bits.advance(place * 4096)  # a separate range of counters for each place
    return np.random.Generator(bits).integers(count, size=attempts)


def steps_per_epoch(
    index: Index, batch: int, *, micro_batch: int = 1, world_size: int = 1, table: str = "train."
) -> int:
    """Number of whole batches that the samples fill. The remaining samples are not used in this epoch.

    Raises:
        UserError: there are fewer samples than a batch. The message names a batch, and a micro-batch if it has to be
            smaller too, that they fill on so many ranks. `table` is the table of the two keys.
    """
    steps = len(index) // batch
    if steps == 0:
        fitting = max(1, min(micro_batch, len(index) // world_size))
        option = f"--set {table}" if table else ""
        keys = f"{option}batch={len(index) // fitting * fitting}"
        if fitting < micro_batch:
            keys += f" {option}micro_batch={fitting}"
        raise UserError(
            f"{index.root} has {len(index)} images, fewer than {table}batch = {batch}: use more images, a "
            f"larger data.label_fraction, or {keys}"
        )
    return steps


@dataclass(frozen=True)
class Schedule:
    """The steps that one rank loads, and its rows of their batches.

    Attributes:
        batch: samples in a step, over all ranks.
        rows: the consecutive rows of each batch that the rank loads.
        last_step: the schedule ends before this step; None: never.
    """

    order: Order
    batch: int
    rows: range
    first_step: int = 0
    last_step: int | None = None

    def steps(self) -> Iterable[int]:
        """The steps, from the first on."""
        return itertools.count(self.first_step) if self.last_step is None else range(self.first_step, self.last_step)

    def positions(self, step: int) -> IntArray:
        """Global positions that the rank loads at `step`: (len(rows),) int64."""
        return step * self.batch + np.array(self.rows, np.int64)

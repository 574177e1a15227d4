"""The global order: every sample once per epoch, the same whoever loads it; and fractions of whole groups."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.samples.index import Index, SourceRows
from peclr_dali.pipelines.samples.order import (
    EpochOrder,
    MixtureOrder,
    Schedule,
    build_order,
    interleave,
    rows_per_batch,
)
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.samples.subsets import in_fraction


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_visits_every_sample_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(EpochOrder(count, count, seed=seed).samples(epoch, np.arange(count))) == list(range(count))


def test_order_does_not_depend_on_earlier_calls() -> None:
    one, other = EpochOrder(97, 96, seed=3), EpochOrder(97, 96, seed=3)
    for epoch in (5, 6, 2, 7):
        one.samples(epoch, np.arange(96))
    np.testing.assert_array_equal(one.samples(2, np.arange(96)), other.samples(2, np.arange(96)))
    assert not np.array_equal(one.samples(2, np.arange(96)), one.samples(3, np.arange(96)))


def test_substitutes_are_a_function_of_the_place() -> None:
    order = EpochOrder(1000, 1000, seed=0)
    np.testing.assert_array_equal(order.substitutes(2, 17, 8), EpochOrder(1000, 900, seed=0).substitutes(2, 17, 8))
    assert not np.array_equal(order.substitutes(2, 17, 8), order.substitutes(2, 18, 8))
    assert not np.array_equal(order.substitutes(2, 17, 8), order.substitutes(3, 17, 8))
    assert not np.array_equal(order.substitutes(2, 17, 8), EpochOrder(1000, 1000, seed=1).substitutes(2, 17, 8))


def test_the_order_of_one_source_has_not_changed() -> None:
    """Golden: recorded before there were mixtures. A change here would make every resumed run another one."""
    order = build_order(index_of([1000]), batch=64, seed=7)
    assert order.length == 960
    np.testing.assert_array_equal(order.samples(3, np.array([0, 1, 2, 500, 959])), [337, 448, 344, 883, 357])
    np.testing.assert_array_equal(order.substitutes(3, 17, 5), [636, 946, 213, 353, 826])


def index_of(counts: list[int], weights: list[float] | None = None) -> Index:
    """An index of several sources of which only the numbers matter."""
    names, total = [f"source {number}" for number in range(len(counts))], sum(counts)
    sources = [SourceRows(*row) for row in zip(names, counts, weights or [1.0] * len(counts), strict=True)]
    boxes_px = np.zeros((total, 3), np.float32)
    return Index("joined", Path(), [""] * total, boxes_px, sources=tuple(sources) if len(counts) > 1 else ())


MIXTURES = st.tuples(
    st.lists(st.integers(1, 12), min_size=3, max_size=3),  # rows of each source in a batch
    st.tuples(st.integers(1, 3), st.integers(4, 60), st.integers(100, 400)),  # images of each, of very different size
    st.integers(0, 2**63),
)


@settings(max_examples=40, deadline=None)
@given(MIXTURES)
def test_every_batch_holds_exact_shares_and_every_lap_each_sample_of_its_source_once(
    mixture: tuple[list[int], tuple[int, int, int], int],
) -> None:
    rows, counts, seed = mixture
    batch, first = sum(rows), np.cumsum([0, *counts])
    order = MixtureOrder(counts, rows, 2 * batch, seed=seed)
    samples = order.samples_at(np.arange((2 + 2 * max(counts) // min(rows)) * batch))
    sources = np.searchsorted(first, samples, side="right") - 1
    for held in sources.reshape(-1, batch):
        np.testing.assert_array_equal(np.bincount(held, minlength=3), rows)
    for source, count in enumerate(counts):
        own = samples[(first[source] <= samples) & (samples < first[source + 1])] - first[source]
        whole = own[: len(own) // count * count].reshape(-1, count)
        assert len(whole) >= 2
        np.testing.assert_array_equal(np.sort(whole, axis=1), np.broadcast_to(np.arange(count), whole.shape))
        assert count < 30 or not np.array_equal(whole[0], whole[1])


def test_every_lap_is_a_shuffle_of_its_own() -> None:
    """No two alike: not of two laps, of two sources of as many images, nor of two seeds."""
    count, laps = 40, []
    for seed in (0, 1):
        samples = MixtureOrder([count, count], [4, 4], 80, seed=seed).samples_at(np.arange(2 * 6 * count))
        for own in (samples[samples < count], samples[samples >= count] - count):
            laps += own.reshape(6, count).tolist()
    assert len(laps) == 24
    assert len(set(map(tuple, laps))) == 24


@settings(max_examples=25, deadline=None)
@given(MIXTURES, st.integers(0, 4))
def test_ranks_and_resumption_see_one_global_order(
    mixture: tuple[list[int], tuple[int, int, int], int], resumed_at: int
) -> None:
    """1, 2, 3 and 8 ranks, each with an order of its own, the last ones started in the middle of the run."""
    rows, counts, seed = mixture
    micro_batch, steps = sum(rows), 6
    batch = 8 * micro_batch

    def loaded(ranks: int, first_step: int) -> IntArray:
        by_step = []
        orders = [MixtureOrder(counts, [8 * count for count in rows], 2 * batch, seed=seed) for _ in range(ranks)]
        shares = [micro_batch_share(batch, micro_batch, rank, ranks) for rank in range(ranks)]
        for step in range(first_step, steps):
            by_step += [
                order.samples_at(Schedule(order, batch, share).positions(step))
                for order, share in zip(orders, shares, strict=True)
            ]
        return np.concatenate(by_step)

    whole = loaded(1, 0)
    for ranks in (2, 3, 8):
        np.testing.assert_array_equal(loaded(ranks, 0), whole)
        np.testing.assert_array_equal(loaded(ranks, resumed_at), whole[resumed_at * batch :])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=6), st.integers(1, 3000))
def test_rows_of_a_batch_differ_from_the_weights_by_less_than_one(weights: list[float], batch: int) -> None:
    rows = rows_per_batch(weights, batch)
    assert sum(rows) == batch
    np.testing.assert_array_less(np.abs(np.array(weights) / sum(weights) * batch - rows), 1 + 1e-6)


def test_the_largest_remainders_get_a_row_more() -> None:
    assert rows_per_batch([1, 1, 1], 2048) == [683, 683, 682]
    assert rows_per_batch([0.1, 0.5, 0.4], 4) == [0, 2, 2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=4), st.sampled_from([2, 3, 8]))
def test_micro_batches_hold_about_the_same_shares(rows: list[int], parts: int) -> None:
    """Exactly the same where the rows divide; else within the number of sources."""
    for multiple in (1, parts):
        sources = interleave([multiple * count for count in rows])
        assert np.bincount(sources).tolist() == [multiple * count for count in rows]
        pieces = [np.bincount(piece, minlength=len(rows)) for piece in np.array_split(sources, parts)]
        spare = np.ptp(pieces, axis=0).max()
        assert spare == 0 if multiple == parts else spare <= len(rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 20), st.integers(3, 9), st.integers(0, 2**63))
def test_no_batch_holds_a_sample_twice(apart: int, times: int, seed: int) -> None:
    """Also where a lap ends within it, if the source has at least three batches' worth of samples."""
    count = times * apart + 1
    order = MixtureOrder([count, 10 * count], [apart, 3], apart + 3, seed=seed)
    batches = order.samples_at(np.arange(6 * times * (apart + 3))).reshape(-1, apart + 3)
    assert all(len(set(batch)) == len(batch) for batch in batches.tolist())


def test_substitutes_come_from_the_same_source() -> None:
    order = MixtureOrder([5, 1000], [3, 3], 60, seed=0)
    for position, source in enumerate(interleave([3, 3]).tolist()):
        substitutes = order.substitutes(2, position, 64)
        assert np.array_equal(substitutes >= 5, np.full(64, source == 1))
        assert len(set(substitutes.tolist())) > 1
        np.testing.assert_array_equal(substitutes, order.substitutes(2, position, 64))


def test_an_epoch_of_several_sources_has_the_batches_that_all_images_fill() -> None:
    assert build_order(index_of([100, 31]), batch=12, seed=0).length == 120


GROUPS = st.lists(
    st.integers(min_value=-(2**63), max_value=2**63 - 1) | st.integers(0, 9), min_size=1, max_size=60
).map(lambda numbers: np.array(numbers, np.int64))
FRACTIONS = st.floats(min_value=0, max_value=1, exclude_min=True)
SEEDS = st.integers(min_value=0, max_value=2**32)


@settings(deadline=None)
@given(group=GROUPS, fractions=st.tuples(FRACTIONS, FRACTIONS), seed=SEEDS, data=st.data())
def test_fractions_of_whole_groups(
    group: np.ndarray, fractions: tuple[float, float], seed: int, data: st.DataObject
) -> None:
    """A smaller fraction is a subset of a larger one; the order of the samples does not matter."""
    small, large = (in_fraction(group, fraction, seed=seed) for fraction in sorted(fractions))
    assert not (small & ~large).any()
    inside = set(group[small].tolist())
    assert not inside & set(group[~small].tolist())
    assert len(inside) == max(1, round(min(fractions) * len(set(group.tolist()))))
    shuffle = np.array(data.draw(st.permutations(range(len(group)))), np.int64)
    np.testing.assert_array_equal(in_fraction(group[shuffle], min(fractions), seed=seed), small[shuffle])
    assert in_fraction(group, 1.0, seed=seed).all()


def test_seeds_choose_differently_and_each_choice_is_fixed() -> None:
    poses = np.tile(np.arange(1000), 4)
    chosen = [set(poses[in_fraction(poses, 0.1, seed=seed)].tolist()) for seed in range(20)]
    assert all(len(choice) == 100 for choice in chosen)
    overlaps = [len(one & other) for row, one in enumerate(chosen) for other in chosen[:row]]
    assert 5 < np.mean(overlaps) < 15  # ten of a hundred by chance
    assert sorted(chosen[0])[:5] == [8, 10, 12, 25, 66]  # a published subset must never move

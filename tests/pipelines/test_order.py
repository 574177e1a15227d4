"""The global order: every sample once per epoch, the same whoever loads it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.order import EpochOrder, RankSlice


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_visits_every_sample_once(count: int, seed: int, epoch: int) -> None:
    samples = EpochOrder(count, count, seed=seed).samples(epoch, np.arange(count))
    assert sorted(samples) == list(range(count))


def test_order_does_not_depend_on_what_was_asked_before() -> None:
    one, other = EpochOrder(97, 96, seed=3), EpochOrder(97, 96, seed=3)
    for epoch in (5, 6, 2, 7):
        one.samples(epoch, np.arange(96))
    np.testing.assert_array_equal(one.samples(2, np.arange(96)), other.samples(2, np.arange(96)))
    assert not np.array_equal(one.samples(2, np.arange(96)), one.samples(3, np.arange(96)))


def test_without_shuffling_the_index_is_the_order() -> None:
    np.testing.assert_array_equal(EpochOrder(9, 9, seed=0, shuffle=False).samples(4, np.arange(9)), np.arange(9))


def test_an_epoch_longer_than_the_index_is_refused() -> None:
    with pytest.raises(ValueError, match="without repeating"):
        EpochOrder(9, 10, seed=0)


def test_substitutes_are_a_function_of_the_place() -> None:
    order = EpochOrder(1000, 1000, seed=0)
    np.testing.assert_array_equal(order.substitutes(2, 17, 8), EpochOrder(1000, 900, seed=0).substitutes(2, 17, 8))
    assert not np.array_equal(order.substitutes(2, 17, 8), order.substitutes(2, 18, 8))
    assert not np.array_equal(order.substitutes(2, 17, 8), order.substitutes(3, 17, 8))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 5))
def test_ranks_together_load_the_global_batch(shares: list[int], step: int) -> None:
    batch, edges = sum(shares), np.cumsum([0, *shares])
    loaded = [
        RankSlice(batch, start, stop).positions(step)
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(loaded), np.arange(step * batch, (step + 1) * batch))

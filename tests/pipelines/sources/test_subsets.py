from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.subsets import in_fraction

GROUPS = st.lists(
    st.integers(min_value=-(2**63), max_value=2**63 - 1) | st.integers(0, 9), min_size=1, max_size=60
).map(lambda numbers: np.array(numbers, np.int64))
FRACTIONS = st.floats(min_value=0, max_value=1, exclude_min=True)
SEEDS = st.integers(min_value=0, max_value=2**32)


@settings(deadline=None)
@given(group=GROUPS, fractions=st.tuples(FRACTIONS, FRACTIONS), seed=SEEDS)
def test_a_smaller_fraction_is_a_subset(group: np.ndarray, fractions: tuple[float, float], seed: int) -> None:
    small, large = (in_fraction(group, fraction, seed=seed) for fraction in sorted(fractions))
    assert small.any()
    assert not (small & ~large).any()


@settings(deadline=None)
@given(group=GROUPS, fraction=FRACTIONS, seed=SEEDS)
def test_groups_are_taken_whole_and_in_the_right_number(group: np.ndarray, fraction: float, seed: int) -> None:
    taken = in_fraction(group, fraction, seed=seed)
    groups = set(group.tolist())
    inside = set(group[taken].tolist())
    assert not inside & set(group[~taken].tolist())
    assert len(inside) == max(1, round(fraction * len(groups)))


@settings(deadline=None)
@given(group=GROUPS, fraction=FRACTIONS, seed=SEEDS, data=st.data())
def test_the_order_of_the_samples_does_not_matter(
    group: np.ndarray, fraction: float, seed: int, data: st.DataObject
) -> None:
    shuffle = np.array(data.draw(st.permutations(range(len(group)))), np.int64)
    np.testing.assert_array_equal(
        in_fraction(group[shuffle], fraction, seed=seed), in_fraction(group, fraction, seed=seed)[shuffle]
    )


@settings(deadline=None)
@given(group=GROUPS, seed=SEEDS)
def test_the_fraction_one_keeps_all_samples(group: np.ndarray, seed: int) -> None:
    assert in_fraction(group, 1.0, seed=seed).all()


def test_seeds_choose_differently_and_each_choice_is_fixed() -> None:
    poses = np.tile(np.arange(1000), 4)
    chosen = [set(poses[in_fraction(poses, 0.1, seed=seed)].tolist()) for seed in range(20)]
    assert all(len(choice) == 100 for choice in chosen)
    overlaps = [len(one & other) for row, one in enumerate(chosen) for other in chosen[:row]]
    assert 5 < np.mean(overlaps) < 15  # ten of a hundred by chance
    assert sorted(chosen[0])[:5] == GOLDEN


GOLDEN = [8, 10, 12, 25, 66]
"""A published subset must never move."""


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_fraction_is_one(fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        in_fraction(np.arange(3), fraction, seed=0)

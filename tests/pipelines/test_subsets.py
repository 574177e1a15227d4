import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.pipelines.samples.subsets import in_fraction

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

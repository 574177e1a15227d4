"""Which rank is called slow, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from peclr_dali.train.runs.meter import RankTime, Straggler, slowest_rank


def timing(seconds: float, host: str = "a", images: int = 8) -> RankTime:
    return RankTime(host, images, seconds / 4, 3 * seconds / 4)


def test_the_slowest_rank_is_that_of_the_longest_time_per_image() -> None:
    for times, expected in (([0.2, 0.2, 0.8], 2), ([0.8, 0.2], 0)):
        rank, ratio = slowest_rank([timing(seconds) for seconds in times])
        assert rank == expected
        assert ratio == pytest.approx(4.0)
    assert slowest_rank([timing(0.2), timing(0.2)]) == (0, 1.0)
    rank, ratio = slowest_rank([timing(0.4, images=16), timing(0.3)])  # twice the images in less than twice the time
    assert rank == 1
    assert ratio == pytest.approx(1.5)


def told(*intervals: Sequence[float]) -> list[int]:
    """In which log intervals of steps of one second something is said."""
    straggler = Straggler()
    said = [straggler.seen([timing(seconds) for seconds in times], 1.0) for times in intervals]
    return [number for number, line in enumerate(said) if line is not None]


def test_a_straggler_is_reported_once_when_it_was_slow_three_times_in_a_row() -> None:
    even, slow, other = (0.5, 0.45), (0.5, 0.3), (0.3, 0.5)
    assert told(even, even, even, even) == []  # 0.05 s of a second: nobody stands out
    assert told(slow, slow, even, slow, slow) == []
    assert told(slow, slow, other, other, slow, slow) == []
    assert told(slow, slow, slow, slow, slow, even, slow, slow, slow) == [2, 8]


def test_a_straggler_is_named_with_its_host_and_its_times() -> None:
    straggler = Straggler()
    lines = [straggler.seen([timing(0.2), timing(0.2), timing(0.8, "c")], 1.0) for _ in range(3)]
    assert lines[2] == (
        "rank 2 on c slows the others down: 4.0 x the median time per image; per step 0.200 s of computing and "
        "0.600 s of waiting for data"
    )

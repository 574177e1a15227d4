import math
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from peclr_dali.bench.measure import (
    Rate,
    Rounds,
    cpu_seconds,
    interval_of_mean,
    measure_in_rounds,
)


def test_rate_is_images_over_time() -> None:
    closed = []

    def batches() -> Iterator[int]:
        try:
            time.sleep(0.2)  # start-up, which the warm-up takes
            while True:
                time.sleep(0.01)
                yield 5
        finally:
            closed.append(True)

    (rate,) = measure_in_rounds([batches], Rounds(warmup_s=0.1, repeat_s=0.1, repeats=3), print)
    assert len(rate.images_per_s) == 3
    assert 200 < rate.mean <= 500
    assert rate.images % 5 == 0
    assert rate.cpu_s_per_image < 0.002
    assert rate.images / rate.seconds == pytest.approx(rate.mean, rel=0.2)
    assert rate.cores_busy < 1
    assert closed == [True] * 3


def test_rounds_take_turns() -> None:
    turns = []

    def named(name: str) -> Iterator[int]:
        turns.append(name)
        while True:
            yield 1

    calls: list[tuple[int, int]] = []
    measure_in_rounds(
        [lambda: named("a"), lambda: named("b")],
        Rounds(warmup_s=0, repeat_s=0, repeats=3),
        lambda done, total: calls.append((done, total)),
    )
    assert turns == ["a", "b"] * 3
    assert calls == [(done, 6) for done in range(7)]


def test_statistics_in_closed_form() -> None:
    rate = Rate((1.0, 2.0, 6.0), 0.0, 9)
    assert rate.mean == 3.0
    half = 4.302653 * 7**0.5 / 3**0.5
    assert rate.interval == pytest.approx((3 - half, 3 + half))
    assert interval_of_mean((1.0, 3.0)).high == pytest.approx(2 + 12.706205)
    assert interval_of_mean((1.0, 3.0) * 20).high == pytest.approx(2 + 2.022691 * (40 / 39 / 40) ** 0.5)


def test_a_ratio_of_rounds_does_not_see_the_drift_that_both_share() -> None:
    drift = (1.0, 3.0, 0.5, 7.0)
    fast, slow = (Rate(tuple(speed * at for at in drift), 0.0, 9) for speed in (6.0, 2.0))
    ratio = fast.over(slow)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((3, 3, 3))
    uneven = Rate((2.0, 8.0), 0.0, 9).over(Rate((1.0, 1.0), 0.0, 9))
    assert uneven.mean == pytest.approx(4)
    assert math.log(uneven.high / 4) == pytest.approx(12.706205 * math.log(2))
    assert uneven.low * uneven.high == pytest.approx(16)


def test_one_repeat_has_no_interval() -> None:
    with pytest.raises(ValueError, match="repeats is 1"):
        measure_in_rounds([lambda: iter([1])], Rounds(repeats=1), print)


def test_an_iterator_that_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended after 4 images"):
        measure_in_rounds([lambda: iter([3, 4])], Rounds(warmup_s=1, repeat_s=1), print)


BUSY = "import time\nwhile time.process_time() < {}: pass\nprint('done', flush=True)\ninput()"


def test_processor_time_of_children_counts_while_they_live_and_after() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY.format(0.3)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert cpu_seconds() - before >= 0.28
        child.communicate("\n")
    assert cpu_seconds() - before >= 0.28

import math
import subprocess
import sys
import time
from collections.abc import Generator

import pytest

from peclr_dali.bench.measure import Rate, Repeat, Rounds, cpu_seconds, measure_in_rounds


def rate_of(*images_per_s: float) -> Rate:
    """A rate whose repeats took a second each."""
    return Rate([Repeat(images=value, seconds=1.0, cpu_s=0.5) for value in images_per_s])  # type: ignore[arg-type]


def test_loaders_take_turns_and_their_start_is_not_measured() -> None:
    turns, closed = [], []

    def slow() -> Generator[int]:
        turns.append("slow")
        try:
            time.sleep(0.2)  # start-up
            while True:
                time.sleep(0.01)
                yield 5
        finally:
            closed.append(True)

    def fast() -> Generator[int]:
        turns.append("fast")
        while True:
            yield 1

    rate, _ = measure_in_rounds([slow, fast], Rounds(warmup_s=0.1, repeat_s=0.1, repeats=3), lambda *done: None)
    assert turns == ["slow", "fast"] * 3
    assert closed == [True] * 3
    assert [value <= 500 for value in rate.images_per_s] == [True] * 3
    assert rate.cores_busy < 1


def test_statistics_in_closed_form() -> None:
    row = rate_of(1, 2, 6).as_row()
    half = 4.302653 * 7**0.5 / 3**0.5
    assert row["interval"] == pytest.approx([3 - half, 3 + half], abs=0.05)
    assert row | {"interval": 0} == {
        "images_per_s": 3.0, "interval": 0, "repeats": [1, 2, 6], "cpu_ms_per_image": 166.667, "cores_busy": 0.5,
        "images": 9,
    }  # fmt: skip


def test_a_ratio_of_rounds_does_not_see_the_drift_that_both_share() -> None:
    drift = (1.0, 3.0, 0.5, 7.0)
    assert rate_of(*(6 * at for at in drift)).over(rate_of(*(2 * at for at in drift))) == pytest.approx((3, 3, 3))
    uneven = rate_of(2, 8).over(rate_of(1, 1))
    assert uneven.value == pytest.approx(4)
    assert math.log(uneven.high / 4) == pytest.approx(12.706205 * math.log(2))
    assert uneven.low * uneven.high == pytest.approx(16)


BUSY = "import time\nwhile time.process_time() < {}: pass\nprint('done', flush=True)\ninput()"


def test_processor_time_of_children_counts_while_they_live_and_after() -> None:
    before = cpu_seconds()
    program = [sys.executable, "-c", BUSY.format(0.3)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert cpu_seconds() - before >= 0.28
        child.communicate("\n")
    assert cpu_seconds() - before >= 0.28

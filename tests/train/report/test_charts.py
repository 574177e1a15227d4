"""Charts show what they are given."""

from __future__ import annotations

import pytest

from peclr_dali.train.report.charts import Line, line_chart


@pytest.mark.parametrize(
    ("y", "marks"),
    [([3.0], 1), ([None, 3.0, None], 1), ([3.0, 2.0, 4.0], 0), ([None, 3.0, 2.0], 0), ([None, None], 0)],
)
@pytest.mark.parametrize("log", [False, True])
def test_the_only_value_of_a_line_is_marked(y: list[float | None], marks: int, log: bool) -> None:
    chart = line_chart("Loss", [Line(range(len(y)), y)], x_label="step", log=log)
    assert chart.svg.count("<use ") == marks

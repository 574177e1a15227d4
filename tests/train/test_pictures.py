"""A run's pictures: plain numbers at the ticks, and no file while they are drawn."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.figure import Figure

from peclr_dali.train.runs.pictures import log_axis


@pytest.mark.parametrize("values", [[36, 41], [0.9, 2.2], [3, 40], [9, 1000], [3, 4000]])
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(values: list[float]) -> None:
    figure = Figure(figsize=(7, 2.2))
    axis = figure.subplots()
    axis.plot(values)
    log_axis(axis)
    figure.canvas.draw()
    low, high = axis.get_ylim()
    labels = [*axis.yaxis.get_ticklabels(), *axis.yaxis.get_ticklabels(minor=True)]
    shown = [label for label in labels if label.get_text() and low <= label.get_position()[1] <= high]
    assert len(shown) > 2
    for label in shown:
        assert label.get_text().replace(".", "").isdecimal()
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: float(box.y0))
    assert all(below.y1 < above.y0 for below, above in itertools.pairwise(boxes))

"""The ticks of a run's pictures are plain numbers."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from train.pictures import log_axis


@pytest.mark.parametrize("values", [[36, 41], [0.9, 2.2], [3, 4000]])
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(values: list[float]) -> None:
    figure = Figure(figsize=(7, 5))
    axis = figure.subplots()
    axis.plot(values)
    log_axis(axis)
    figure.canvas.draw()
    words = [tick.get_text() for tick in [*axis.yaxis.get_ticklabels(), *axis.yaxis.get_ticklabels(minor=True)]]
    assert len(words) > 2
    for word in words:
        float(word)

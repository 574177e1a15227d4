"""Draws are a pure function of (seed, epoch, position, view)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.draws import ColourConfig, Draw, FloatArray, GeometryConfig, draw_view

GEOMETRY, COLOUR = GeometryConfig(), ColourConfig()


def draw(positions: list[int], *, seed: int = 0, epoch: int = 0, view: int = 0) -> FloatArray:
    return draw_view(GEOMETRY, COLOUR, seed=seed, epoch=epoch, view=view, positions=np.array(positions, np.int64))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_a_position_draws_the_same_in_any_company(positions: list[int]) -> None:
    together = draw(positions)
    for row, position in enumerate(positions):
        np.testing.assert_array_equal(together[row], draw([position])[0])


def test_seed_epoch_view_and_position_all_matter() -> None:
    rows = [
        draw([5])[0],
        draw([6])[0],
        draw([5], seed=1)[0],
        draw([5], epoch=1)[0],
        draw([5], view=1)[0],
    ]
    angles = {float(row[Draw.ANGLE_DEG]) for row in rows}
    assert len(angles) == len(rows)


def test_draws_fill_their_ranges_evenly_and_independently() -> None:
    table = draw(list(range(20_000)))
    ranges = {
        Draw.ANGLE_DEG: (-45, 45),
        Draw.SHIFT_X_FRAC: (-15 / 128, 15 / 128),
        Draw.SHIFT_Y_FRAC: (-15 / 128, 15 / 128),
        Draw.MAGNIFICATION: (0.6, 2.0),
        Draw.HUE: (0.01, 1),
        Draw.SATURATION: (0.01, 1),
        Draw.VALUE_SCALE: (0.5, 1),
        Draw.VALUE_SHIFT: (5, 20),
    }
    assert set(ranges) == set(Draw)
    for column, (low, high) in ranges.items():
        unit = (table[:, column] - low) / (high - low)
        assert unit.min() >= -1e-6
        assert unit.max() <= 1 + 1e-6
        counts, _ = np.histogram(unit, bins=20, range=(0, 1))
        assert np.abs(counts / 1000 - 1).max() < 0.15  # five standard deviations of a bin
    correlation = np.corrcoef(table.T) - np.eye(len(Draw))
    assert np.abs(correlation).max() < 0.04


def test_a_shared_factor_scales_hue_and_saturation_alike() -> None:
    table = draw_view(GEOMETRY, ColourConfig(shared_factor=True), seed=0, epoch=0, view=0, positions=np.arange(50))
    np.testing.assert_array_equal(table[:, Draw.HUE], table[:, Draw.SATURATION])


def test_scale_as_margin_is_the_reciprocal_magnification() -> None:
    positions = np.arange(50)
    magnified = draw_view(GEOMETRY, COLOUR, seed=0, epoch=0, view=0, positions=positions)
    margin = draw_view(GeometryConfig(scale_is="margin"), COLOUR, seed=0, epoch=0, view=0, positions=positions)
    np.testing.assert_allclose(margin[:, Draw.MAGNIFICATION], 1 / magnified[:, Draw.MAGNIFICATION], rtol=1e-6)


@pytest.mark.parametrize("wrong", [{"rotation_deg": (45, -45)}, {"scale": (0.0, 1.0)}, {"fill": 256}, {"sidepx": 1}])
def test_impossible_ranges_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GeometryConfig(**wrong)  # type: ignore[arg-type]

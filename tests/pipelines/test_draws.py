"""Draws are a pure function of (seed, epoch, position, view)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.randomness import MOST_VIEWS
from peclr_dali.pipelines.views import columns, plan
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.draws import COLUMNS, UNIFORMS_PER_VIEW, draw_view

DEFAULT = Augmentation()
CROPPED = GeometryConfig(crop_probability=0.25, flip_probability=0.35)
ALL = AppearanceConfig(
    sobel_probability=0.5,
    cut_out_probability=0.4,
    blur_probability=0.3,
    noise_probability=0.2,
    colour_drop_probability=0.1,
)


def draw(
    positions: list[int] | range, augmentation: Augmentation = DEFAULT, *, seed: int = 0, epoch: int = 0, view: int = 0
) -> FloatArray:
    return draw_view(augmentation, seed=seed, epoch=epoch, view=view, places=np.array(positions, np.int64))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_the_draws_of_a_position_do_not_depend_on_other_positions(positions: list[int]) -> None:
    together = draw(positions)
    for row, position in enumerate(positions):
        np.testing.assert_array_equal(together[row], draw([position])[0])


def test_seed_epoch_view_and_position_all_matter() -> None:
    views = [draw([5], view=view) for view in range(MOST_VIEWS)]
    tables = [*views, draw([6]), draw([5], seed=1), draw([5], epoch=1)]
    assert len({float(table[0, Draw.ANGLE_DEG]) for table in tables}) == len(tables)


def test_draws_fill_their_ranges_evenly_and_independently() -> None:
    table = draw(range(20_000))
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
    for column, (low, high) in ranges.items():
        unit = (table[:, column] - low) / (high - low)
        assert unit.min() >= -1e-6
        assert unit.max() <= 1 + 1e-6
        counts, _ = np.histogram(unit, bins=20, range=(0, 1))
        assert np.abs(counts / 1000 - 1).max() < 0.15  # five standard deviations of a bin
    assert not table[:, len(ranges) :].any()  # what is off
    assert np.abs(np.corrcoef(table[:, : len(ranges)].T) - np.eye(len(ranges))).max() < 0.04


def draw_all(positions: list[int] | range, geometry: GeometryConfig = CROPPED) -> FloatArray:
    return draw(positions, Augmentation(geometry, appearance=ALL), seed=7, epoch=3, view=1)


def test_the_first_columns_never_change() -> None:
    """Bit for bit what they were before there were others, also where those are on: old runs can be repeated."""
    golden = [
        [1099362152, 1008584420, 1025224972, 1072369679, 1029995278, 1057657562, 1058377672, 1093980325],
        [3256846829, 3178896794, 1024376329, 1072637985, 1034079446, 1023649389, 1064738321, 1097513989],
        [1101410489, 1025047427, 3168305668, 1070821488, 1060716527, 1064231230, 1065336593, 1092440841],
    ]
    positions = [0, 5, 123456]
    for table in (draw(positions, seed=7, epoch=3, view=1), draw_all(positions)):
        assert np.ascontiguousarray(table[:, :8]).view(np.uint32).tolist() == golden


@pytest.mark.parametrize(
    ("number", "message"), [(3, "aliases found .* FLIP -> MAGNIFICATION"), (26, "missing values 24")]
)
def test_a_number_that_two_columns_have_or_none_is_refused_at_import(number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exec(Path(columns.__file__).read_text().replace("FLIP = 24", f"FLIP = {number}"), {"__name__": "columns"})
    assert COLUMNS <= UNIFORMS_PER_VIEW


def test_augmentations_of_the_study_have_their_probability_and_are_independent() -> None:
    table = draw_all(range(20_000))
    gates = {
        Draw.SOBEL: 0.5, Draw.CUT_OUT: 0.4, Draw.BLUR: 0.3, Draw.NOISE: 0.2, Draw.COLOUR_DROP: 0.1,
        Draw.CROP: CROPPED.crop_probability, Draw.FLIP: CROPPED.flip_probability,
    }  # fmt: skip
    for column, probability in gates.items():
        assert set(np.unique(table[:, column])) == {0, 1}
        assert abs(table[:, column].mean() - probability) < 0.02  # five standard deviations
    assert np.abs(np.corrcoef(table[:, list(gates)].T) - np.eye(len(gates))).max() < 0.04
    assert len(np.unique(table[:, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]], axis=0)) > 19_990


def test_draws_of_the_study_stay_within_their_bounds() -> None:
    table = draw_all(range(20_000), GeometryConfig(side_px=50, crop_probability=1, crop_side_frac=(0.3, 0.9)))
    cut_px = table[:, Draw.CUT_OUT_SIDE_PX]
    assert set(cut_px) == set(range(9))  # up to 0.16 of 50
    for corner in (Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX):
        for cut in range(9):
            assert set(table[cut_px == cut, corner]) == set(range(50 - cut + 1))
    for column, count in {Draw.CUT_OUT_GREY: 256, Draw.NOISE_KEY_HIGH: 2**16, Draw.NOISE_KEY_LOW: 2**16}.items():
        assert (table[:, column] == np.floor(table[:, column])).all()
        assert table[:, column].min() < 0.01 * count
        assert 0.99 * count < table[:, column].max() < count
    sigma_px = table[:, Draw.BLUR_SIGMA_PX]
    assert 0.1 <= sigma_px.min() < 0.12
    assert 1.98 < sigma_px.max() <= 2
    side = table[:, Draw.CROP_SIDE_FRAC]
    assert 0.3 <= side.min() < 0.31
    assert 0.89 < side.max() <= 0.9
    for center in (Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC):
        assert 0.499 < (np.abs(table[:, center]) + side / 2).max() <= 0.5 + 1e-6


def test_one_factor_scales_hue_and_saturation_and_a_margin_is_the_reciprocal_magnification() -> None:
    table = draw(range(50), Augmentation(colour=ColourConfig(shared_factor=True)))
    np.testing.assert_array_equal(table[:, Draw.HUE], table[:, Draw.SATURATION])
    magnified, margin = draw(range(50)), draw(range(50), Augmentation(GeometryConfig(scale_is="margin")))
    np.testing.assert_allclose(margin[:, Draw.MAGNIFICATION], 1 / magnified[:, Draw.MAGNIFICATION], rtol=1e-6)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (GeometryConfig, "scale", (0.0, 1.0)),
        (GeometryConfig, "crop_side_frac", (0.0, 1.0)),
        (AppearanceConfig, "sobel_probability", 1.1),
        (AppearanceConfig, "blur_sigma_px", (0, 1)),
        (AppearanceConfig, "noise_std", -1),
    ],
)
def test_impossible_values_are_refused(table: type, key: str, value: object) -> None:
    with pytest.raises(ValidationError):
        table(**{key: value})


def test_images_are_halved_by_how_much_their_views_shrink_them() -> None:
    """The magnification is the root of the map's change of areas, also of crops and mirrors; its bound is below all."""
    geometry = GeometryConfig(side_px=64, crop_probability=0.5, crop_side_frac=(0.3, 0.6), flip_probability=0.5)
    table = draw(range(500), Augmentation(geometry)).astype(np.float64)
    box = np.random.default_rng(0).uniform(50, 400, (500, 3))
    _, source_to_view, magnification = plan._compose(box, table, geometry.side_px, box[:, 0] > 200)
    np.testing.assert_allclose(magnification, np.sqrt(np.abs(np.linalg.det(source_to_view[:, :, :2]))), rtol=1e-9)
    for probability in (0.5, 1.0):
        one = replace(geometry, crop_probability=probability)
        drawn = draw(range(500), Augmentation(one)).astype(np.float64)
        magnification = plan._compose(box, drawn, one.side_px, np.zeros(500, bool))[2] * box[:, 2]
        assert plan._least_magnification_px(one) <= magnification.min() <= 1.2 * plan._least_magnification_px(one)

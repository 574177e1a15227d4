from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import orthogonal_procrustes

from peclr_dali.train.pose.metrics import (
    THRESHOLDS_M,
    THRESHOLDS_PX,
    Interval,
    area,
    confidence_intervals,
    mean_over_samples,
    metric_of,
    pck_curve,
    pixel_errors,
    pose_tables,
    relative_pixel_errors,
)

Array = npt.NDArray[np.float64]


def hands(count: int, seed: int = 0, noise_m: float = 0.02) -> tuple[Array, Array]:
    """Predicted and true, metres: errors on both sides of 5 cm."""
    rng = np.random.default_rng(seed)
    true_m = rng.normal((0, 0, 0.7), 0.05, (count, 21, 3))
    return true_m + rng.normal(0, noise_m, true_m.shape) * rng.uniform(0.2, 2, (count, 1, 1)), true_m


def metrics(predicted_m: Array, true_m: Array, **options: Any) -> dict[str, float]:
    return {name: metric_of(table) for name, table in pose_tables(predicted_m, true_m, **options).items()}


def freihand_script(
    predicted_m: Array, true_m: Array, valid: npt.NDArray[np.bool_], procrustes: Callable[[Array, Array], Array]
) -> tuple[Array, Array, Array]:
    """FreiHAND's procedure as loops over hands, keypoints and thresholds: mean error, area, PCK curve."""
    distances: list[list[float]] = [[] for _ in range(21)]
    for predicted, true, counts in zip(predicted_m, true_m, valid, strict=True):
        moved = procrustes(predicted[counts], true[counts])
        for keypoint, a, b in zip(np.flatnonzero(counts), moved, true[counts], strict=True):
            distances[keypoint].append(float(np.sqrt(np.sum((a - b) ** 2))))
    thresholds = np.linspace(0, 0.05, 100)
    means, areas, curves = [], [], []
    for of_keypoint in distances:
        if not of_keypoint:
            continue
        curve = [np.mean([d <= t for d in of_keypoint]) for t in thresholds]
        means.append(np.mean(of_keypoint))
        areas.append(np.trapezoid(curve, thresholds) / 0.05)
        curves.append(curve)
    return np.array(means), np.array(areas), np.mean(curves, axis=0)


def scipy_aligned(predicted: Array, true: Array) -> Array:
    a, b = true - true.mean(0), predicted - predicted.mean(0)
    a_size, b_size = np.linalg.norm(a), np.linalg.norm(b)
    turn, scale = orthogonal_procrustes(a / a_size, b / b_size)
    return np.asarray(b / b_size @ turn.T * scale * a_size + true.mean(0))


def umeyama(predicted: Array, true: Array) -> Array:
    """Least squares with a proper rotation (Umeyama 1991, eq. 40 to 43)."""
    source, target = predicted - predicted.mean(0), true - true.mean(0)
    u, d, vt = np.linalg.svd(target.T @ source / len(source))
    signs = np.array([1, 1, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    scale = (d * signs).sum() / (source**2).sum() * len(source)
    return np.asarray(scale * source @ (u * signs @ vt).T + true.mean(0))


@pytest.mark.parametrize("proper_rotation", [False, True])
@pytest.mark.parametrize("partly", [False, True])
def test_equals_freihands_procedure_as_loops(proper_rotation: bool, partly: bool) -> None:
    predicted_m, true_m = hands(60)
    predicted_m[::3] *= [-1, 1, 1]  # mirrored ones, which the two alignments treat differently
    valid = np.random.default_rng(1).random((60, 21)) < (0.7 if partly else 2)
    valid[:, 7] &= not partly  # a keypoint that no hand has
    tables = pose_tables(predicted_m, true_m, valid=valid, proper_rotation=proper_rotation)
    measured = ~np.isnan(mean_over_samples(tables["epe_cm"]))
    assert measured.sum() == (20 if partly else 21)

    epe, auc, pck = freihand_script(predicted_m, true_m, valid, lambda predicted, true: predicted)
    pa_epe, pa_auc, pa_pck = freihand_script(predicted_m, true_m, valid, umeyama if proper_rotation else scipy_aligned)
    for name, expected, rtol, atol in (
        ("epe_cm", 100 * epe, 1e-12, 0),
        ("auc", auc, 1e-10, 0),
        ("pa_epe_cm", 100 * pa_epe, 1e-5, 0),
        ("pa_auc", pa_auc, 0, 1e-6),
    ):
        np.testing.assert_allclose(mean_over_samples(tables[name])[measured], expected, rtol=rtol, atol=atol)
        assert metric_of(tables[name]) == pytest.approx(expected.mean(), rel=rtol, abs=atol)
    np.testing.assert_allclose(pck_curve(tables["epe_cm"] / 100, THRESHOLDS_M), pck, rtol=1e-10)
    np.testing.assert_allclose(pck_curve(tables["pa_epe_cm"] / 100, THRESHOLDS_M), pa_pck, atol=1e-6)
    assert 0.2 < metric_of(tables["auc"]) < 0.9  # some errors are within 5 cm and some are not
    np.testing.assert_allclose(100 * THRESHOLDS_M, np.linspace(0, 5, 100))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.01, 100), st.booleans())
def test_alignment_undoes_any_similarity(seed: int, scale: float, proper_rotation: bool) -> None:
    _, true_m = hands(4, seed)
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(4, 3, 3)))[0]
    turn[:, :, 0] *= np.sign(np.linalg.det(turn))[:, None]
    moved = scale * true_m @ turn + rng.normal(size=(4, 1, 3))
    assert metrics(moved, true_m, proper_rotation=proper_rotation)["pa_epe_cm"] < 1e-3


def test_degenerate_input_is_refused() -> None:
    predicted_m, true_m = hands(4)
    broken, one_point = predicted_m.copy(), true_m.copy()
    broken[2:, 5, 1], one_point[3] = np.nan, 0.5
    for predicted, true, message in (
        (broken, true_m, "a keypoint is not finite"),
        (predicted_m, broken, "a keypoint is not finite"),
        (predicted_m, one_point, "a pose is a single point"),
    ):
        with pytest.raises(ValueError, match=message):
            pose_tables(predicted, true)


def test_keypoints_that_are_not_valid_may_have_any_value() -> None:
    predicted_m, true_m = hands(6)
    valid = np.ones((6, 21), bool)
    valid[0], valid[1, :19] = False, False  # no keypoint; two, which is too few to align
    expected = pose_tables(predicted_m[2:], true_m[2:])
    predicted_m[0], true_m[0, 3], predicted_m[1, 4] = np.nan, np.inf, -np.inf
    found = pose_tables(predicted_m, true_m, valid=valid)
    assert [int((~np.isnan(found[name])).any(axis=1).sum()) for name in ("epe_cm", "pa_epe_cm")] == [5, 4]
    assert metric_of(found["pa_epe_cm"]) == pytest.approx(metric_of(expected["pa_epe_cm"]))
    of_keypoints, wanted = (mean_over_samples(tables["epe_cm"])[:19] for tables in (found, expected))
    np.testing.assert_allclose(of_keypoints, wanted)


def test_pixels() -> None:
    true_px = np.zeros((2, 21, 2))
    predicted_px = true_px + np.array([3.0, 4.0])
    predicted_px[1] *= 3
    errors_px = pixel_errors(predicted_px, true_px)
    assert metric_of(errors_px) == pytest.approx(10)
    assert metric_of(area(errors_px, THRESHOLDS_PX)) == pytest.approx(np.mean([25 / 30, 15 / 30]), abs=0.006)
    assert pck_curve(errors_px, THRESHOLDS_PX)[-1] == 1
    one = pixel_errors(predicted_px, true_px, valid=np.arange(42).reshape(2, 21) < 21)
    assert metric_of(one) == pytest.approx(5)
    assert np.isnan(one[1]).all()


def test_errors_relative_to_view_and_hand() -> None:
    """A hand of 40 x 20 px, off by 3, 5 and 9 px, in views of 112 px that show it twice as large."""
    true_px = np.array([[[0.0, 0], [40, 10], [20, 20], [np.nan, np.nan]]])
    found = relative_pixel_errors(np.array([[3.0, 5, 9, np.nan]]), true_px, np.array([2.0]), 112)
    np.testing.assert_allclose(found["epe_px_of_224"], [[12, 20, 36, np.nan]])
    np.testing.assert_array_equal(found["pck_0.1"], [[1, 0, 0, np.nan]])
    np.testing.assert_array_equal(found["pck_0.2"], [[1, 1, 0, np.nan]])
    true_px[:, 1:] = np.nan  # a rectangle around one keypoint has no side
    alone = relative_pixel_errors(np.array([[3.0, np.nan, np.nan, np.nan]]), true_px, np.array([2.0]), 112)
    assert np.isnan(alone["pck_0.2"]).all()
    assert alone["epe_px_of_224"][0, 0] == 12


def test_dependent_hands_widen_the_interval() -> None:
    """Four copies of each hand are no more evidence than one."""
    table = np.random.default_rng(0).normal(size=(100, 21)) + np.random.default_rng(1).normal(size=(100, 1))
    copies = np.tile(table, (4, 1))
    once, naive, grouped = (
        confidence_intervals({"m": values}, groups=groups)["m"]
        for values, groups in ((table, None), (copies, None), (copies, np.tile(np.arange(100), 4)))
    )
    assert grouped.high - grouped.low == pytest.approx(once.high - once.low, rel=1e-9)
    assert naive.high - naive.low < 0.6 * (once.high - once.low)


def test_resampling_equals_a_loop_over_hands() -> None:
    """The weights are those of hands drawn with replacement, and gaps stay out of the means."""
    table = np.random.default_rng(0).normal(size=(31, 21))  # 30 hands count
    table[2, 3] = table[4] = np.nan
    found = confidence_intervals({"m": table}, resamples=50, seed=3)["m"]
    rng = np.random.default_rng(3)
    values = []
    for counts in rng.multinomial(31, np.full(31, 1 / 31), size=50):
        drawn = np.repeat(table, counts, axis=0)
        values.append(np.nanmean([np.nanmean(c) for c in drawn.T if not np.isnan(c).all()]))
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(values, [2.5, 97.5])))


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (2, 12, 5, 9, 3, 7), (3, 5, 9)])
def test_intervals_of_few_groups_cover_the_truth(sizes: tuple[int, ...]) -> None:
    """The bootstrap's contain it in less than 86 % of such experiments; groups share half of the variance."""
    rng, members, covered = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes), 0
    for _ in range(1000):
        table = rng.normal(size=(len(sizes), 1))[members] + rng.normal(size=(len(members), 21))
        interval = confidence_intervals({"m": table}, groups=members, resamples=1)["m"]
        covered += interval.low < 0 < interval.high
    assert 0.92 < covered / 1000 < 0.98


@pytest.mark.parametrize("count", [4, 29])
def test_of_groups_alike_the_interval_is_students_over_their_means(count: int) -> None:
    table = np.random.default_rng(0).exponential(size=(5 * count, 21))
    found = confidence_intervals({"m": table}, groups=np.arange(5 * count) % count, confidence=0.9)["m"]
    means = [table[row::count].mean() for row in range(count)]
    wanted = stats.t.interval(0.9, count - 1, loc=np.mean(means), scale=stats.sem(means))
    assert (found.low, found.high) == pytest.approx(wanted)


def test_too_few_or_too_unequal_groups_give_no_interval() -> None:
    table = np.random.default_rng(0).uniform(size=(9, 21))
    for rows, groups in ((table[:1], None), (table, [7] * 5 + [8] * 4), (table, [1] * 7 + [2, 3])):
        found = confidence_intervals({"m": rows}, groups=groups)["m"]
        assert found.value > 0
        assert np.isnan([found.low, found.high]).all()
    gaps = np.full((5, 21), np.nan)  # poses without a value do not make an interval
    gaps[1:3] = 1
    assert np.isnan(confidence_intervals({"m": gaps})["m"].low)
    gaps[3] = 1
    assert confidence_intervals({"m": gaps})["m"] == Interval(1, 1, 1)

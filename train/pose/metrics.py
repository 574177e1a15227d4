"""Metrics of poses: end-point error and area under the PCK curve, both also after Procrustes alignment.

The defaults follow FreiHAND's evaluation script. Per keypoint it takes the mean error, and the trapezoidal area under
the share of errors within 100 thresholds from 0 to 5 cm; both are averaged over keypoints. It aligns by SciPy's
orthogonal_procrustes, which may mirror the prediction. Every metric is a mean over poses for each keypoint, then over
keypoints, so resampling poses gives its confidence interval.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from scipy.special import stdtrit

from peclr_dali.pipelines.arrays import AnyArray, BoolArray, DoubleArray, IntArray

THRESHOLDS_M: Final = np.linspace(0.0, 0.05, 100)
"""Thresholds of the PCK curves in 3D."""
THRESHOLDS_PX: Final = np.linspace(0.0, 30.0, 100)
"""Thresholds of the PCK curve in 2D."""
LEAST_GROUPS: Final = 3
"""Smallest number of groups for a confidence interval."""
LEAST_EQUAL_GROUPS: Final = 2.0
"""Smallest number of groups of one size that have to tell as much (see `equal_groups`), for a confidence interval."""
NO_INTERVAL: Final = "no interval: too few or too unequal groups, or one pre-training"
_EPSILON: Final = 1e-8  # added to divisors, as in FreiHAND's script


class Metric(NamedTuple):
    """Name, unit and format of a metric; the unit of a share is empty."""

    title: str
    unit: str
    decimals: int
    higher_is_better: bool
    meaning: str

    @property
    def title_and_unit(self) -> str:
        """Such as "EPE, cm"."""
        return ", ".join(filter(None, (self.title, self.unit)))


METRICS: Final = {
    "pa_epe_cm": Metric("PA-EPE", "cm", 2, False, "mean distance after alignment: the shape of the pose alone"),
    "pa_auc": Metric("PA-AUC", "", 3, True, "area under the PCK curve after alignment, 0 to 5 cm"),
    "pa_epe_px": Metric("PA-EPE", "px", 1, False, "mean distance after alignment, in pixels of the source"),
    "epe_cm": Metric("EPE", "cm", 2, False, "mean distance in the camera's frame: shape and place"),
    "auc": Metric("AUC", "", 3, True, "area under the PCK curve in the camera's frame, 0 to 5 cm"),
    "epe_px": Metric("2D EPE", "px", 1, False, "mean distance in the picture, in pixels of the source"),
    "epe_px_of_224": Metric("2D EPE (view)", "px of 224", 1, False, "mean distance in views of 224 pixels"),
    "pck_0.1": Metric("PCK 0.1", "", 3, True, "share of keypoints within 0.1 of the side of the box around the labels"),
    "pck_0.2": Metric("PCK 0.2", "", 3, True, "share of keypoints within 0.2 of the side of the box around the labels"),
}
"""All metrics, in the order of importance."""

CONSTANTS: Final = {
    "mean_keypoints": "the mean keypoints in the box",
    "mean_joints": "the mean joints",
    "rigid_pose": "one rigid pose",
}
"""Constant predictions beside which errors are seen (`peclr_dali.train.evaluation.errors`), and words for them."""


def constants_in_words(constants: Mapping[str, Mapping[str, float]], metric: str) -> list[str]:
    """The constant predictions that were measured by a metric, such as "one rigid pose 1.54"."""
    return [
        f"{CONSTANTS[name]} {errors[metric]:.{METRICS[metric].decimals}f}"
        for name, errors in constants.items()
        if metric in errors
    ]


def beats_constants(value: float, metric: str, constants: Mapping[str, Mapping[str, float]]) -> bool | None:
    """Whether a metric's value is better than those of all constant predictions; None if none was measured by it."""
    sign = 1 if METRICS[metric].higher_is_better else -1
    margins = [sign * (value - errors[metric]) for errors in constants.values() if metric in errors]
    return min(margins) > 0 if margins else None


class Interval(NamedTuple):
    """A value with the limits of its confidence interval; NaN if there is no interval."""

    value: float
    low: float
    high: float


def pose_tables(
    predicted_m: AnyArray,
    true_m: AnyArray,
    *,
    valid: BoolArray | None = None,
    proper_rotation: bool = False,
) -> dict[str, DoubleArray]:
    """Tables (N, K) of the four metrics in 3D. The mean over poses, then over keypoints, is the metric.

    NaN for keypoints that do not count. In the tables of the AUC, an entry is the area under the step function of one
    error.

    Args:
        predicted_m: (N, K, 3) in metres.
        true_m: (N, K, 3) in metres.
        valid: (N, K) whether a keypoint counts; by default all. Only these are used for alignment.
        proper_rotation: forbid alignment by a reflection, as the authors' code does. FreiHAND's script allows it.

    Raises:
        ValueError: a valid keypoint is not finite, or a true pose is a single point.
    """
    predicted, true, counts = _checked(predicted_m, true_m, valid)
    alignable = counts.sum(axis=1, keepdims=True) >= 3  # with fewer, a similarity transform fits any pose
    aligned = align(predicted, true, valid=counts, proper_rotation=proper_rotation)
    error_m, pa_error_m = _distances(predicted, true, counts), _distances(aligned, true, counts & alignable)
    return {
        "epe_cm": 100 * error_m,
        "auc": area(error_m, THRESHOLDS_M),
        "pa_epe_cm": 100 * pa_error_m,
        "pa_auc": area(pa_error_m, THRESHOLDS_M),
    }


def in_one_place(points: AnyArray, valid: BoolArray) -> BoolArray:
    """Mask (N,) of poses with two or more valid keypoints that are all in one place, so that they cannot be aligned.

    `points` is (N, K, 3), `valid` (N, K); points that are not valid may have any value.
    """
    kept = np.where(valid[..., None], points.astype(np.float64), 0)
    shape = np.where(valid[..., None], kept - _centre(kept, valid), 0)
    return np.asarray((np.linalg.norm(shape, axis=(1, 2)) < _EPSILON) & (valid.sum(axis=1) > 1))


def align(
    predicted_m: AnyArray,
    true_m: AnyArray,
    *,
    valid: BoolArray | None = None,
    proper_rotation: bool = False,
) -> DoubleArray:
    """Align each prediction to its true pose by the best similarity transform (Procrustes).

    Arguments and errors as `pose_tables`.

    Returns:
        (N, K, 3) in metres, NaN if not valid.
    """
    predicted, true, counts = _checked(predicted_m, true_m, valid)
    true_centre, centre = _centre(true, counts), _centre(predicted, counts)  # (N, 1, 3)
    true_shape, shape = (np.where(counts[..., None], p - c, 0) for p, c in ((true, true_centre), (predicted, centre)))
    true_size, size = (np.linalg.norm(shape_, axis=(1, 2), keepdims=True) for shape_ in (true_shape, shape))
    if in_one_place(true, counts).any():
        raise ValueError("true_m: a pose is a single point, so nothing can be aligned to it; mark it as not valid")
    true_shape, shape = true_shape / (true_size + _EPSILON), shape / (size + _EPSILON)
    # The orthogonal R that makes |true R - predicted| least, from the singular values of true^T predicted.
    left, singular, right = np.linalg.svd(true_shape.transpose(0, 2, 1) @ shape)
    if proper_rotation:
        mirrors = np.linalg.det(left @ right) < 0
        left[mirrors, :, 2] *= -1
        singular[mirrors, 2] *= -1
    scale = singular.sum(axis=1)[:, None, None] * (true_size + _EPSILON)
    return np.where(counts[..., None], shape @ (left @ right).transpose(0, 2, 1) * scale + true_centre, np.nan)


def pixel_errors(predicted_px: AnyArray, true_px: AnyArray, *, valid: BoolArray | None = None) -> DoubleArray:
    """Distances (N, K) between (N, K, 2) arrays, NaN if not valid."""
    return _distances(*_checked(predicted_px, true_px, valid))


def relative_pixel_errors(
    error_px: DoubleArray, true_px: DoubleArray, view_px_per_px: DoubleArray, view_side_px: int
) -> dict[str, DoubleArray]:
    """Errors in 2D that do not depend on the picture's size, as tables (N, K) like `pose_tables`; NaN as in `error_px`.

    Args:
        error_px: (N, K) from `pixel_errors`, in pixels of the source.
        true_px: (N, K, 2) labels, NaN where unknown; the longer side of the rectangle around them is the unit of PCK.
        view_px_per_px: (N,) pixels of the view for one of the source.
        view_side_px: side of the views.
    """
    known_px = np.ma.masked_invalid(true_px)
    side_px = np.ma.filled((known_px.max(axis=1) - known_px.min(axis=1)).max(axis=1), np.nan)[:, None]  # (N, 1)
    # A single keypoint has no side to compare with.
    within = {f"pck_{share}": np.where(side_px > 0, error_px <= share * side_px, np.nan) for share in (0.1, 0.2)}
    tables = {"epe_px_of_224": error_px * view_px_per_px[:, None] * 224 / view_side_px, **within}
    return {name: np.where(np.isnan(error_px), np.nan, table) for name, table in tables.items()}


def confidence_intervals(
    tables: Mapping[str, DoubleArray],
    *,
    groups: IntArray | Sequence[int] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Intervals of metrics over groups of poses: of the bootstrap (percentiles), or of few groups Student's t.

    They do not include the variation between training runs, which needs several seeds. Groups of several sizes count as
    fewer groups of one size (`equal_groups`); with too few there is no interval (`why_no_interval`). Of few groups, the
    bootstrap's intervals are too short. In 1,000 simulated experiments each, with normal and with exponential errors of
    the groups, intervals of 95 % contain the truth in so many per cent:

        groups                            4     8     12    20    24    30    40
        bootstrap, normal errors          80    91    91    92    93    93    93
        Student's t, normal errors        95    94    94    96    96    96    95
        bootstrap, exponential errors     74    87    88    90    92    93    92
        Student's t, exponential errors   88    90    90    93    92    93    93

    Args:
        tables: (N, K) each, from `pose_tables`; NaN if a keypoint does not count. For two networks on the same samples,
            give the differences of their tables: the difficulty of a sample cancels in them.
        groups: (N,) group numbers. Samples that depend on each other, such as one pose before several backgrounds, have
            the same number and are drawn together. By default every sample is a group.
        confidence: share of the resamples inside the interval.
    """
    count = len(next(iter(tables.values())))
    members = np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]
    tail = 50 * (1 - confidence)
    drawn: dict[str, list[DoubleArray]] = {name: [] for name in tables}
    rng, group_count = np.random.default_rng(seed), int(members.max()) + 1
    for start in range(0, resamples, 100):  # resamples at a time, to limit the memory
        times = rng.multinomial(group_count, np.full(group_count, 1 / group_count), size=min(100, resamples - start))
        weights = times[:, members].astype(np.float64)  # how often each sample's group is drawn
        for name, table in tables.items():
            drawn[name].append(_weighted_metric(table, weights))
    intervals = {}
    for name, table in tables.items():
        value, low, high = metric_of(table), np.nan, np.nan
        measured = members[~np.isnan(table).all(axis=1)]
        number = equal_groups(measured)
        if number >= 30:
            low, high = np.nanpercentile(np.concatenate(drawn[name]), [tail, 100 - tail])
        elif not why_no_interval(measured):
            reach = stdtrit(number - 1, 1 - tail / 100) * _standard_error(table, members, number)
            low, high = value - reach, value + reach
        intervals[name] = Interval(value, float(low), float(high))
    return intervals


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Mean of independent values, at least two, and its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def interval_over_runs(tables: Sequence[DoubleArray], trials: Sequence[Hashable], groups: IntArray) -> Interval:
    """Mean difference of a metric between two ways to train, over pairs of runs, and its 95 % interval.

    The half of its width is the root of the sum of two squares: of Student's interval over the trials, and of the
    bootstrap's over the hands. One trial has an interval without ends.

    Args:
        tables: for each pair, the table (N, K) of the metric of its first run minus that of its second one, on the same
            N samples, see `pose_tables`.
        trials: for each pair, its pre-training. Pairs that start from one pre-training are no independent trials: they
            count as one, with their mean.
        groups: (N,) group of each sample, as for `confidence_intervals`.
    """
    differences = [metric_of(table) for table in tables]
    mean = statistics.fmean(differences)
    means = [
        statistics.fmean(difference for difference, its in zip(differences, trials, strict=True) if its == trial)
        for trial in dict.fromkeys(trials)
    ]
    if len(means) == 1:
        return Interval(mean, -math.inf, math.inf)
    over_trials = interval_of_mean(means)
    over_hands = confidence_intervals({"": np.mean(tables, axis=0)}, groups=groups)[""]
    half = math.hypot(over_trials.high - over_trials.value, (over_hands.high - over_hands.low) / 2)
    return Interval(mean, mean - half, mean + half)


def equal_groups(groups: IntArray) -> float:
    """Number of groups of one size that tell as much as those of N poses, given the number of each pose's group.

    It is (sum of sizes)^2 / (sum of sizes^2) (Kish 1965).
    """
    sizes = np.unique(groups, return_counts=True)[1]
    return float(sizes.sum() ** 2 / max(1, (sizes**2).sum()))


def why_no_interval(groups: IntArray) -> str:
    """Why the groups of N poses, given the number of each pose's group, give no interval; empty if they give one."""
    count, number = len(np.unique(groups)), equal_groups(groups)
    if count < LEAST_GROUPS:
        return f"the images are {count} groups, expected at least {LEAST_GROUPS}"
    if number < LEAST_EQUAL_GROUPS:
        return (
            f"one of the {count} groups is so large that they tell as much as {number:.1f} of one size, expected at "
            f"least {LEAST_EQUAL_GROUPS:g}"
        )
    return ""


def _standard_error(table: DoubleArray, members: IntArray, number: float) -> float:
    """Standard error of the metric of a table (N, K) over a number of groups; `members` (N,) says which.

    For groups of one size it is that of the groups' means. Else a group counts by its part of the metric's sum.
    """
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    apart = np.where(known, table - mean_over_samples(table), 0)[:, counts > 0] / counts[counts > 0]
    parts = np.bincount(members, weights=apart.mean(axis=1))  # of each group; their sum is 0
    return float(np.sqrt(number / (number - 1) * (parts**2).sum()))


def mean_over_samples(table: DoubleArray) -> DoubleArray:
    """Mean over poses, (N, K) -> (K,), ignoring NaN; NaN for a keypoint without any value."""
    return np.asarray(np.ma.masked_invalid(table).mean(axis=0).filled(np.nan))


def metric_of(table: DoubleArray) -> float:
    """The metric of a table (N, K): the mean over poses, then over keypoints with a value; NaN if there is none."""
    values = mean_over_samples(table)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _checked(
    predicted: AnyArray, true: AnyArray, valid: BoolArray | None
) -> tuple[DoubleArray, DoubleArray, BoolArray]:
    """Both arrays as float64, with zeros for keypoints that do not count, and the mask of keypoints that count."""
    ours, theirs = predicted.astype(np.float64), true.astype(np.float64)
    counts = np.ones(theirs.shape[:2], bool) if valid is None else valid
    if not np.isfinite(np.concatenate([ours[counts], theirs[counts]])).all():
        raise ValueError("a keypoint is not finite; mark it as not valid, and report how many there are")
    keep = counts[..., None]
    return np.where(keep, ours, 0), np.where(keep, theirs, 0), counts


def _centre(points: DoubleArray, counts: BoolArray) -> DoubleArray:
    """Mean of the keypoints that count: (N, K, 3), zero for the others -> (N, 1, 3)."""
    return np.asarray(points.sum(axis=1, keepdims=True) / np.maximum(counts.sum(axis=1), 1)[:, None, None])


def _distances(predicted: DoubleArray, true: DoubleArray, counts: BoolArray) -> DoubleArray:
    return np.where(counts, np.linalg.norm(predicted - true, axis=2), np.nan)


def area(errors: DoubleArray, thresholds: DoubleArray) -> DoubleArray:
    """For each error: area under its step function (0 below the error, else 1), by trapezoids, over the range."""
    weights = np.gradient(thresholds)
    weights[[0, -1]] /= 2
    tail = np.append(np.cumsum(weights[::-1])[::-1], 0)  # area from the i-th threshold on
    reached = np.searchsorted(thresholds, np.nan_to_num(errors, nan=np.inf))
    return np.where(np.isnan(errors), np.nan, tail[reached] / tail[0])


def pck_curve(errors: DoubleArray, thresholds: DoubleArray) -> DoubleArray:
    """Share of errors within each threshold, per keypoint, then averaged: (N, K) -> (len(thresholds),)."""
    counts = np.sum(~np.isnan(errors), axis=0)
    within = np.array([np.sum(errors <= threshold, axis=0) for threshold in thresholds])  # (T, K)
    return np.asarray(np.ma.masked_invalid(within[:, counts > 0] / counts[counts > 0]).mean(axis=1).filled(np.nan))


def _weighted_metric(table: DoubleArray, weights: DoubleArray) -> DoubleArray:
    """The metric in each resample: (N, K) and (B, N) -> (B,). Keypoints without a value in a resample are left out."""
    known = ~np.isnan(table)
    totals, counts = weights @ np.where(known, table, 0), weights @ known.astype(np.float64)  # (B, K)
    means = totals / counts.clip(min=1)  # the total of no value is 0
    present = np.count_nonzero(counts, axis=1)
    return np.where(present > 0, means.sum(axis=1) / present.clip(min=1), np.nan)

"""Confidence intervals over independent runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.special import stdtrit

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.train.pose.metrics import Floats, Interval, confidence_intervals, metric_of


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Mean of independent values, at least two, and its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def interval_over_runs(tables: Sequence[Floats], trials: Sequence[Hashable], groups: IntArray) -> Interval:
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
    by_trial: dict[Hashable, list[float]] = {}
    for trial, difference in zip(trials, differences, strict=True):
        by_trial.setdefault(trial, []).append(difference)
    if len(by_trial) == 1:
        return Interval(mean, -math.inf, math.inf)
    over_trials = interval_of_mean([statistics.fmean(trial) for trial in by_trial.values()])
    over_hands = confidence_intervals({"": np.mean(tables, axis=0)}, groups=groups)[""]
    half = math.hypot(over_trials.high - over_trials.value, (over_hands.high - over_hands.low) / 2)
    return Interval(mean, mean - half, mean + half)

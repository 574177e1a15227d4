"""Compares two arms of a study in pairs, by seed and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.errors import UserError
from peclr_dali.experiments.config import Claim, Plan
from peclr_dali.experiments.measure import measured_errors
from peclr_dali.train.pose.metrics import METRICS, Floats, Interval, confidence_intervals, metric_of

Row = dict[str, Any]


def compare(plan: Plan, claim: Claim) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The claim "holds" if the whole interval
    is on the better side of zero. The half of its width is the root of the sum of two squares: of Student's
    interval over the seeds, and of the bootstrap's over the hands. Seeds that start from one pre-training are no
    independent trials: they count as one, with their mean.

    Raises:
        UserError: the metric cannot be measured on the arms' images.
    """
    seeds, metric = plan.study.seeds, claim.metric
    better, than = ([measured_errors(plan, seed, name) for seed in seeds] for name in (claim.better, claim.than))
    if metric not in better[0]:
        raise UserError(
            f"{plan.file}: compare: {metric} cannot be measured on {plan.measured_on(claim.better)}, whose labels "
            f"allow {', '.join(better[0].keys() & METRICS.keys())}: compare in another metric"
        )
    tables = [ours[metric] - theirs[metric] for ours, theirs in zip(better, than, strict=True)]
    differences = [metric_of(table) for table in tables]
    mean, low, high = float(np.mean(differences)), -math.inf, math.inf  # one trial gives no interval
    of_start: dict[int, list[float]] = {}
    for seed, difference in zip(seeds, differences, strict=True):
        of_start.setdefault(plan.pretrain_seed(seed), []).append(difference)
    trials = [float(np.mean(of_one)) for of_one in of_start.values()]
    if len(trials) > 1:
        over_hands = _over_hands(plan, claim, tables, [errors["groups"] for errors in better])
        reach = math.hypot(interval_of_mean(trials).high - np.mean(trials), (over_hands.high - over_hands.low) / 2)
        low, high = mean - reach, mean + reach
    holds = low > 0 if METRICS[metric].higher_is_better else high < 0
    figures = {"differences": differences, "mean": mean, "low": low, "high": high, "holds": holds}
    names = {"better": claim.better, "than": claim.than, "metric": metric}
    return {"kind": "comparison", **names, **figures, "seeds": seeds}


def _over_hands(
    plan: Plan, claim: Claim, tables: Sequence[Floats], groups: Sequence[npt.NDArray[np.int64]]
) -> Interval:
    """The bootstrap's interval of the differences, for each seed a table (N, K) and N groups.

    Hands that all seeds share are drawn with their mean over the seeds; each seed's own hands are drawn for themselves.
    """
    if len({tuple(plan.held_out(claim.better, seed)) for seed in plan.study.seeds}) == 1:
        table, group = np.mean(tables, axis=0), groups[0]
    else:
        apart = [(seed, number) for seed, of_one in enumerate(groups) for number in of_one.tolist()]
        table, group = np.concatenate(tables), np.unique(apart, axis=0, return_inverse=True)[1]
    return confidence_intervals({claim.metric: table}, groups=group)[claim.metric]

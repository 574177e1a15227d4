"""Compares two arms of a study in pairs, by seed and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import stdtrit

from bench.studies.rows import COMPARISON_HEADS, comparison_cells
from errors import UserError
from experiments.config import Claim, Plan
from experiments.measure import Floats, read_errors
from train.pose.metrics import METRICS, confidence_intervals, paired_difference

Row = dict[str, Any]


def compare(plan: Plan, claim: Claim) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The claim "holds" if the whole interval
    is on the better side of zero. The half of its width is the root of the sum of two squares: of Student's
    interval over the seeds, and of the bootstrap's over the hands, which all seeds share.
    """
    better, than = (
        [_table(plan, seed, name, claim.metric) for seed in plan.study.seeds] for name in (claim.better, claim.than)
    )
    groups = read_errors(plan, plan.study.seeds[0], claim.better).groups
    differences = [
        paired_difference({claim.metric: ours}, {claim.metric: theirs}, resamples=1)[claim.metric].value
        for ours, theirs in zip(better, than, strict=True)
    ]
    over_hands = confidence_intervals({claim.metric: np.mean(np.subtract(better, than), axis=0)}, groups=groups)
    mean, count = float(np.mean(differences)), len(differences)
    if count == 1:
        low, high = float("-inf"), float("inf")  # one seed gives no interval
    else:
        seeds_reach = float(stdtrit(count - 1, 0.975) * np.std(differences, ddof=1) / count**0.5)
        reach = math.hypot(seeds_reach, (over_hands[claim.metric].high - over_hands[claim.metric].low) / 2)
        low, high = mean - reach, mean + reach
    holds = low > 0 if METRICS[claim.metric].higher_is_better else high < 0
    figures = {"differences": differences, "mean": mean, "low": low, "high": high, "holds": holds}
    names = {"better": claim.better, "than": claim.than, "metric": claim.metric}
    return {"kind": "comparison", **names, **figures, "seeds": plan.study.seeds}


def as_table(outcomes: Sequence[Row]) -> Table:
    """The comparisons as a table for the terminal."""
    table = Table(title="better minus than, paired by seed and hand")
    for head in COMPARISON_HEADS:
        table.add_column(head, overflow="fold")
    for row in outcomes:
        table.add_row(*comparison_cells(row))
    return table


def _table(plan: Plan, seed: int, name: str, metric: str) -> Floats:
    """The errors (N, K) of an arm in a metric."""
    tables = read_errors(plan, seed, name).tables
    if metric not in tables:
        raise UserError(
            f"{plan.file}: compare: {metric} of {name} cannot be measured on {plan.measured_on(name)}, whose labels "
            f"allow {', '.join(tables)}: compare in another metric"
        )
    return tables[metric]

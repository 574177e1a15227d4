"""Compares the arms of a study in pairs, by seed and by hand, and writes the tables of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.bench.rows import markdown
from peclr_dali.bench.studies.measure import measured_errors
from peclr_dali.bench.studies.study import Claim, Study
from peclr_dali.errors import UserError
from peclr_dali.train.pose.metrics import METRICS, confidence_intervals, metric_of

Row = dict[str, Any]


def compare(study: Study, claim: Claim) -> Row:
    """Compare two arms over all seeds: a row with the differences `better` minus `than`.

    "low" and "high" are the ends of the 95 % interval of the mean difference. The claim "holds" if the whole interval
    is on the better side of zero. The half of its width is the root of the sum of two squares: of Student's
    interval over the seeds, and of the bootstrap's over the hands. Seeds that start from one pre-training are no
    independent trials: they count as one, with their mean. One trial gives no interval.

    Raises:
        UserError: the metric cannot be measured on the arms' images.
    """
    better, than = ([measured_errors(study, seed, name) for seed in study.seeds] for name in (claim.better, claim.than))
    if claim.metric not in better[0]:
        raise UserError(f"{study.name}: {claim.metric} of {claim.better} cannot be measured: compare in another metric")
    tables = [ours[claim.metric] - theirs[claim.metric] for ours, theirs in zip(better, than, strict=True)]
    differences = [metric_of(table) for table in tables]
    mean, low, high = float(np.mean(differences)), -math.inf, math.inf
    of_start: dict[int, list[float]] = {}
    for seed, difference in zip(study.seeds, differences, strict=True):
        of_start.setdefault(study.start_seed(seed), []).append(difference)
    trials = [float(np.mean(of_one)) for of_one in of_start.values()]
    if len(trials) > 1:
        table = np.mean(tables, axis=0)
        hands = confidence_intervals({claim.metric: table}, groups=better[0]["groups"])[claim.metric]
        reach = math.hypot(interval_of_mean(trials).high - np.mean(trials), (hands.high - hands.low) / 2)
        low, high = mean - reach, mean + reach
    holds = low > 0 if METRICS[claim.metric].higher_is_better else high < 0
    figures = {"differences": differences, "mean": mean, "low": low, "high": high, "holds": holds}
    names = {"better": claim.better, "than": claim.than, "metric": claim.metric}
    return {"kind": "comparison", **names, **figures, "seeds": [*study.seeds]}


def tables_of(study: Study, rows: Sequence[Row]) -> str:
    """The tables of a study in Markdown, from the rows of `run_study`: arms and constants, comparisons, maps."""
    arms = {name: [row for row in rows if row["kind"] == "arm" and row["arm"] == name] for name in study.measured}
    constants = {row["on"]: row["constants"] for row in rows if row["kind"] == "constant"}
    metrics = {claim.metric for claim in study.compare}.union(*(arm.published for arm in study.measured.values()))
    columns = [metric for metric in METRICS if metric in metrics | {"epe_px"}]
    lines = [
        [name, *(_errors(of_arm, study.measured[name].published, metric) for metric in columns)]
        for name, of_arm in arms.items()
    ]
    lines += [
        [f"{name.replace('_', ' ')}, {root}", *(f"{errors[key]:.3f}" if key in errors else "-" for key in columns)]
        for root, of_root in constants.items()
        for name, errors in of_root.items()
    ]
    heads = [METRICS[metric].title_and_unit for metric in columns]
    parts = [markdown(["mean and range over seeds; published", *heads], lines)]
    if study.compare:
        compared = [row for row in rows if row["kind"] == "comparison"]
        lines = [
            _comparison(row, claim, arms, constants[study.measured_on(claim.better).root])
            for row, claim in zip(compared, study.compare, strict=True)
        ]
        heads = ["", "metric", "each seed", "mean", "95 % interval", "better by", "published", "better than constants"]
        parts.append(markdown(heads, lines))
    if study.maps is not None:
        lines = [_map(study.maps, key, rows) for key in ("rotation_error_px", "shift_error_px")]
        parts.append(markdown(["mean over seeds and places", *study.maps, "better by"], lines))
    return "\n".join(parts)


def _errors(rows: Sequence[Row], published: Mapping[str, float], metric: str) -> str:
    values = [row[metric] for row in rows if metric in row]
    root = " with the true root" if metric in ("epe_cm", "auc") and any(row.get("true_root") for row in rows) else ""
    errors = f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}){root}" if values else "-"
    return f"{errors}; {published[metric]:g}" if metric in published else errors


def _comparison(
    row: Row, claim: Claim, arms: Mapping[str, Sequence[Row]], constants: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """The improvement is relative to the worse arm's error, or to the better arm's AUC, as in the paper.

    A claim counts only if both arms are better than all constant predictions.
    """
    metric, higher = claim.metric, METRICS[claim.metric].higher_is_better
    better, than = (float(np.mean([one[metric] for one in arms[name]])) for name in (claim.better, claim.than))
    percent = 100 * (better - than) / better if higher else 100 * (than - better) / than
    constant = [errors[metric] for errors in constants.values() if metric in errors]
    beats = min(better, than) > max(constant, default=0) if higher else max(better, than) < min(constant, default=0)
    return [
        f"{claim.better} minus {claim.than}",
        METRICS[metric].title_and_unit,
        ", ".join(f"{one:+.3f}" for one in row["differences"]),
        f"{row['mean']:+.3f}",
        f"{row['low']:+.3f} to {row['high']:+.3f}",
        f"{percent:+.1f} %",
        "-" if claim.percent is None else f"{claim.percent:g} %",
        "-" if not constant else "yes" if beats else "no",
    ]


def _map(arms: Sequence[str], key: str, rows: Sequence[Row]) -> list[str]:
    """Mean equivariance errors of two arms over all places, and the range of the improvement from place to place."""
    ours, theirs = (
        np.mean([row[key] for row in rows if row["kind"] == "map" and row["arm"] == name], axis=0) for name in arms
    )
    moved = theirs > 1e-6
    percent = 100 * (1 - ours[moved] / theirs[moved])
    spread = f"{percent.mean():+.1f} %, from {percent.min():+.1f} to {percent.max():+.1f} %"
    return [key.replace("_", " "), f"{ours.mean():.1f}", f"{theirs.mean():.1f}", spread]

"""Measures the networks of a study on held-out hands, and compares two arms in pairs, by seed and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.equivariance_maps import equivariance_maps
from peclr_dali.train.evaluation.errors import evaluation_config, evaluation_constants, measure
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.metrics import METRICS, interval_over_runs, metric_of
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.runs.checkpoint import CHECKPOINTS
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import whole_file

Keys = tuple[str, ...]
"""Keys of a configuration with their values, as for `--set`."""
Row = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


class Claim(NamedTuple):
    """The claim that one arm is better than another."""

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None  # the paper's: of the worse arm's error, or of the better arm's AUC


class Measured(NamedTuple):
    """A network that is measured as an arm of a study. What is measured is kept in files of its run's folder."""

    arm: str
    seed: int
    start: Path | None  # the pre-training, if it starts from one
    out: Path  # the fine-tuning
    on: Keys  # choose the images to measure on

    def read(self, what: Literal["errors", "map"]) -> Arrays:
        """The result of `measure_network`."""
        file = self.out / f"{what}_{self.arm}.npz"
        if not file.exists():
            with whole_file(file) as opened:
                np.savez(opened, **measure_network(self.out, self.on, what))  # type: ignore[arg-type]
        with np.load(file) as saved:
            return dict(saved)


def measure_network(out: Path, on: Keys, what: Literal["errors", "map"]) -> Arrays:
    """Measure the newest network of a fine-tuning on N images.

    Returns:
        What `equivariance_maps` returns; or the table (N, K) of each metric that the labels allow, before the mean, and
        "groups", (N,) group numbers, as for `confidence_intervals`.
    """
    run = load_pose_run(out / CHECKPOINTS)
    config = evaluation_config(run, (), on)
    index = load_index(config.data)
    labels = labels_to_learn(index)
    if what == "map":
        return {**equivariance_maps(run, config, index, labels)}
    world = single_process(config.train.device)
    with progress_bar("measuring") as progress:
        poses = estimate_poses(run.network, index, labels.intrinsics, config, world, progress=progress)
    return {**measure(run, config, index, labels, poses).errors.tables, "groups": index.groups}


def root_of(on: Keys) -> str:
    """The folder of images that keys choose."""
    return load_config(FinetuneConfig, (), on).data[0].root


@cache
def measure_constants(on: Keys) -> dict[str, dict[str, float]]:
    """Errors of constant predictions, see train/evaluation/errors.py."""
    index = load_index(load_config(FinetuneConfig, (), on).data)
    return evaluation_constants(index, labels_to_learn(index))


def compare(claim: Claim, better: Sequence[Measured], than: Sequence[Measured]) -> Row:
    """Check a claim about two arms that are measured with the same seeds on the same images.

    Returns:
        A row with the differences, first minus second. "low" and "high" are the ends of the 95 % interval of the mean,
        see `interval_over_runs`. The claim "holds" if the whole interval is on the better side of zero. It counts only
        if both arms are better than all constants: "beats_constants", None if there are none. "better_by_percent" is
        relative to the second arm's error, or to the first arm's AUC, as in the paper.
    """
    metric = claim.metric
    ours, theirs = ([network.read("errors") for network in arm] for arm in (better, than))
    tables = [first[metric] - second[metric] for first, second in zip(ours, theirs, strict=True)]
    starts = [first.start or second.start or first.seed for first, second in zip(better, than, strict=True)]
    mean, low, high = interval_over_runs(tables, starts, ours[0]["groups"])
    levels = [float(np.mean([metric_of(errors[metric]) for errors in arm])) for arm in (ours, theirs)]
    higher_is_better = METRICS[metric].higher_is_better
    sign = 1 if higher_is_better else -1
    constants = [known[metric] for known in measure_constants(better[0].on).values() if metric in known]
    margins = [sign * (level - constant) for level in levels for constant in constants]
    return {
        "kind": "comparison", "better": claim.better, "than": claim.than, "metric": metric,
        "differences": [metric_of(table) for table in tables], "mean": mean, "low": low, "high": high,
        "holds": min(sign * low, sign * high) > 0,
        "better_by_percent": 100 * sign * mean / levels[0 if higher_is_better else 1],
        "published_percent": claim.percent, "beats_constants": min(margins) > 0 if margins else None,
        "seeds": [network.seed for network in better],
    }  # fmt: skip

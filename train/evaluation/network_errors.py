"""Chooses the images for an evaluation and computes a network's errors on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import WITH_PARTS
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.tables import to_dict
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.metrics import Interval, confidence_intervals, mean_over_samples, paired_difference
from peclr_dali.train.pose.pose_run import PoseRun
from peclr_dali.train.pose.sample_errors import Errors, errors_of


@dataclass(frozen=True)
class Evaluation:
    """A network's errors on the samples of an index, with the configuration of that index."""

    run: PoseRun
    config: FinetuneConfig
    index: Index
    labels: PoseLabels
    errors: Errors

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """The metrics with their bootstrap intervals over samples."""
        return confidence_intervals(self.errors.tables, groups=self.index.group)

    def minus(self, other: Evaluation) -> dict[str, Interval]:
        """Difference of the metrics on the samples measured for both, with intervals."""
        ours, theirs = self.errors.tables, other.errors.tables
        ours, theirs = ({name: one[name] for name in ours if name in theirs} for one in (ours, theirs))
        return paired_difference(ours, theirs, groups=self.index.group)

    def worst(self, count: int) -> npt.NDArray[np.int64]:
        """Rows of the samples with the largest errors after alignment, the worst first."""
        tables = self.errors.tables
        means = mean_over_samples(tables["pa_epe_cm" if "pa_epe_cm" in tables else "epe_px"].T)
        return np.argsort(-means, kind="stable")[: min(count, int(np.isfinite(means).sum()))]


def evaluation_config(run: PoseRun, files: Sequence[Path], overrides: Sequence[str]) -> FinetuneConfig:
    """Configuration of the images to measure on: those that the run held out, unless files and overrides change it.

    If a part or source is not split, all its images are used, unless a split is set.

    Raises:
        UserError: as in `load_config`, or a key of the network is changed.
    """
    config = load_config(FinetuneConfig, files, overrides, base=_of_held_out(run.config))
    whole = [one.part == "evaluation" or one.source == "dexter_object" for one in config.data]
    config = load_config(FinetuneConfig, files, overrides, base=_of_held_out(run.config, whole))
    for name in ("encoder.name", "pose", "geometry.side_px"):
        now, was = (attrgetter(name)(each) for each in (config, run.config))
        if now != was:
            raise UserError(f"{name} belongs to the network of {run.path} and cannot be changed: leave it out")
    return config


def _of_held_out(config: FinetuneConfig, whole: Sequence[bool] = ()) -> dict[str, Any]:
    """A run's configuration as tables, on the images that it held out, with all their labels.

    `whole`: for each source, whether it is not split. Files may replace the sources, so there may be more or fewer.
    """
    tables = to_dict(config)
    for number, source in enumerate(tables["data"]):
        source["label_fraction"] = 1.0
        if number < len(whole) and whole[number]:
            source["split"] = "all"
        elif source["split"] == "train":
            source["split"] = "val"
    return tables


def measure(
    run: PoseRun,
    config: FinetuneConfig,
    index: Index,
    labels: PoseLabels,
    poses: Poses,
    *,
    proper_rotation: bool = False,
) -> Evaluation:
    """Compute the errors of a network on the samples of an index. Arguments as in `Evaluation` and `errors_of`.

    Raises:
        UserError: no sample can be measured.
    """
    unreadable = poses.samples != np.arange(len(index))
    errors = errors_of(poses, labels, unreadable=unreadable, proper_rotation=proper_rotation)
    if errors.measured == 0:
        raise UserError(
            f"{index.root} ({index.name}): no sample can be measured ({errors.reasons}): check images and labels"
        )
    return Evaluation(run, config, index, labels, errors)


def for_other_run(config: FinetuneConfig, run: PoseRun) -> FinetuneConfig:
    """The configuration for another network: the same images, with that network's view side and box margins.

    A source that the network was trained on has its own margin there; others have that of the first.
    """
    margins = {(one.source, one.root): one.box_margin for one in run.config.data}
    sources = tuple(
        dataclasses.replace(one, box_margin=margins.get((one.source, one.root), run.box_margin)) for one in config.data
    )
    return dataclasses.replace(
        config,
        data=sources,
        geometry=run.config.geometry,
        pose=run.config.pose,
        encoder=run.config.encoder,
    )


def trained_on(run: PoseRun, config: FinetuneConfig) -> bool:
    """Whether the configurations say that an evaluation uses training images of the run."""
    same = attrgetter("source", "root", "annotations")
    return run.step > 0 and any(
        same(source) == same(trained)
        and (source.part == trained.part or source.source not in WITH_PARTS)
        and {source.split, trained.split} != {"train", "val"}
        for source in config.data
        for trained in run.config.data
    )

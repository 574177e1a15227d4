"""The configuration of an experiment; like every configuration, it imports neither torch nor DALI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bounds import Count, Seed
from errors import UserError
from train.config import load_config

Metric = Literal["epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"]

_ARM = re.compile(r"[\w-]+")
"""Name of an arm, which is part of a folder's."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arm:
    """One way to train.

    Attributes:
        set: keys of the run's configuration, as `--set` takes them, after those that all arms share.
        start: fine-tuning only: the arm of pre-training whose encoder it starts from; None starts as configured.
    """

    set: tuple[str, ...] = ()
    start: str | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Stage:
    """Pre-training or fine-tuning: what its arms share, and the arms.

    Attributes:
        config: TOML files, as `-c` takes them.
        set: keys that all arms share.
        arms: by name.
    """

    arms: dict[str, Arm]
    config: tuple[Path, ...] = ()
    set: tuple[str, ...] = ()


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Comparison:
    """What is claimed: that one arm of fine-tuning is better than another.

    Attributes:
        better: the arm that should win.
        than: the other.
        metric: by which.
    """

    better: str
    than: str
    metric: Metric = "pa_epe_cm"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExperimentConfig:
    """An experiment.

    Attributes:
        out: folder of its runs.
        data: folder of FreiHAND, or of rendered hands, which are made if the folder is not there.
        poses: rendered hands to make.
        scenes: backgrounds that they share.
        pretrain: the stage of pre-training.
        finetune: the stage of fine-tuning, each arm of which is measured on the evaluation part.
        compare: the claims.
        seeds: of order, augmentation and weights, one experiment each.
        figures_of: which checkpoint is measured: the "last" or the "best" on validation.
    """

    pretrain: Stage
    finetune: Stage
    compare: tuple[Comparison, ...]
    out: Path = Path("runs/experiment")
    data: Path = Path(".data/hands")
    poses: Annotated[Count, Field(ge=10)] = 800
    scenes: Count = 40
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1, 2)
    figures_of: Literal["last", "best"] = "last"


def load_experiment(file: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment's TOML file.

    Raises:
        UserError: it cannot be read, names an arm that there is not or that cannot name a folder, compares an arm with
            itself, or gives a seed twice.
    """
    config = load_config(ExperimentConfig, [file], overrides)
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"{file}: seeds = {list(config.seeds)}: expected each once, since a seed is one experiment")
    for stage, arms in (("pretrain", config.pretrain.arms), ("finetune", config.finetune.arms)):
        for name in arms:
            if not _ARM.fullmatch(name):
                raise UserError(f"{file}: {stage}.arms.{name!r} names a folder: expected letters, digits, - and _")
    for name, arm in config.finetune.arms.items():
        if arm.start is not None and arm.start not in config.pretrain.arms:
            raise UserError(f"{file}: finetune.arms.{name}.start = {arm.start!r}: expected an arm of pretrain.arms")
    for claim in config.compare:
        for name in (claim.better, claim.than):
            if name not in config.finetune.arms:
                raise UserError(f"{file}: compare names {name!r}: expected an arm of finetune.arms")
        if claim.better == claim.than:
            raise UserError(f"{file}: compare names {claim.better!r} as better than itself: expected two arms")
    return config

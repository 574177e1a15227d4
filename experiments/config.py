"""The configuration of an experiment; like every configuration, it imports neither torch nor DALI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bounds import Count, Seed
from errors import UserError
from train.config.finetuning import FinetuneConfig
from train.config.load import load_config
from train.config.pretraining import Config
from train.config.tables import as_toml

C = TypeVar("C", Config, FinetuneConfig)

MetricName = Literal["epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arm:
    """One way to train.

    Attributes:
        set: keys of the run's configuration, as for `--set`, applied after the shared ones.
        start: fine-tuning only: the pre-training arm whose encoder is taken; None: as configured.
    """

    set: tuple[str, ...] = ()
    start: str | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Phase:
    """Pre-training or fine-tuning: the shared settings, and the arms.

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
    """The claim that one fine-tuning arm is better than another in a metric."""

    better: str
    than: str
    metric: MetricName = "pa_epe_cm"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExperimentConfig:
    """An experiment.

    Attributes:
        out: folder of the runs.
        data: folder of FreiHAND, or of rendered hands, which are made if the folder does not exist.
        poses: rendered hands to make.
        scenes: backgrounds of the rendered hands.
        pretrain: the pre-training arms.
        finetune: the fine-tuning arms; each is measured on the evaluation part.
        compare: the claims.
        seeds: seeds of order, augmentation and weights; all arms run once per seed.
        figures_of: checkpoint to measure: the "last", or the "best" on validation.
    """

    pretrain: Phase
    finetune: Phase
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
        UserError: the file cannot be read, an arm does not exist or cannot name a folder, an arm is compared with
            itself, a seed appears twice, or an arm's configuration is wrong.
    """
    config = load_config(ExperimentConfig, [file], overrides)
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"{file}: seeds = {list(config.seeds)}: expected each seed once")
    for phase, arms in (("pretrain", config.pretrain.arms), ("finetune", config.finetune.arms)):
        for name, arm in arms.items():
            key = f"{file}: {phase}.arms.{name}.start"
            if not re.fullmatch(r"[\w-]+", name):
                raise UserError(f"{file}: {phase}.arms.{name!r} names a folder: expected letters, digits, - and _")
            if arm.start is not None and phase == "pretrain":
                raise UserError(f"{key}: only arms of finetune start from another; remove it")
            if arm.start is not None and arm.start not in config.pretrain.arms:
                raise UserError(f"{key} = {arm.start!r}: expected an arm of pretrain.arms")
    for claim in config.compare:
        for name in (claim.better, claim.than):
            if name not in config.finetune.arms:
                raise UserError(f"{file}: compare names {name!r}: expected an arm of finetune.arms")
        if claim.better == claim.than:
            raise UserError(f"{file}: compare: {claim.better!r} is compared with itself: expected two arms")
    for name in config.pretrain.arms:
        settings_of_arm(Config, config, name, config.seeds[0])
    for name in config.finetune.arms:
        settings_of_arm(FinetuneConfig, config, name, config.seeds[0])
    return config


def folder_of(config: ExperimentConfig, seed: int, phase: str, name: str) -> Path:
    """Folder of an arm's run."""
    return config.out / f"seed_{seed}" / f"{phase}_{name}"


def settings_of_arm(kind: type[C], config: ExperimentConfig, name: str, seed: int) -> tuple[C, list[str]]:
    """The configuration of an arm of pre-training or fine-tuning, and the keys that it sets over its phase's files.

    Errors as in `load_config`.
    """
    phase = "pretrain" if kind is Config else "finetune"
    shared: Phase = getattr(config, phase)
    arm: Arm = shared.arms[name]
    own: dict[str, Any] = {
        "data.root": str(config.data),
        "run.out": str(folder_of(config, seed, phase, name)),
        "run.seed": seed,
    }
    if arm.start is not None:
        own["encoder.weights"] = str(folder_of(config, seed, "pretrain", arm.start))
    overrides = [*shared.set, *arm.set, *(f"{key}={as_toml(value)}" for key, value in own.items())]
    try:
        return load_config(kind, shared.config, overrides), overrides
    except UserError as error:
        raise UserError(f"{phase}.arms.{name}: {error}") from error

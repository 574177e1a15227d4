"""A claim about a GPU, what was measured, and whether the claim holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.training.step import StepSettings
from train.config.load import load_config
from train.config.pretraining import Config

CONFIGS = Path(__file__).parents[2] / "configs"

_TINY = (
    "encoder.name=resnet18", "geometry.side_px=32", "train.batch=16", "train.micro_batch=8", "train.compile=false",
    "pipelines.batch=8", "train.precision=fp32", "train.threads=1",
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        what: the quantity measured.
        found: the measured value, with its unit.
        wanted: the value that is claimed, with its unit.
        holds: whether the claim holds; None without a claim, or where it cannot be checked.
    """

    what: str
    found: str
    wanted: str
    holds: bool | None


def at_least(what: str, found: float, wanted: float, unit: str = "x") -> Claim:
    """The claim that a figure is at least `wanted`."""
    return Claim(what, f"{found:.3g} {unit}", f"at least {wanted:g} {unit}", found >= wanted)


def at_most(what: str, found: float, wanted: float, unit: str = "x") -> Claim:
    """The claim that a figure is at most `wanted`."""
    return Claim(what, f"{found:.3g} {unit}", f"at most {wanted:g} {unit}", found <= wanted)


def looked_at(what: str, found: str) -> Claim:
    """A figure that is reported without a claim."""
    return Claim(what, found, "-", None)


Findings = dict[str, Any]
"""The findings of a stage, as keys of its row. "claims" is a list of `Claim`."""


@dataclass(frozen=True)
class Job:
    """The input of a stage.

    Attributes:
        out: folder for the results.
        data: images in FreiHAND's layout.
        tiny: a dry run: every stage at toy size, on any device; its figures mean nothing.
    """

    out: Path
    data: Path
    tiny: bool

    def overrides(self, *more: str) -> list[str]:
        """Settings of every configuration: the job's data, random weights, and `more`."""
        return [f"data.root={self.data}", "encoder.weights=random", *more, *(_TINY if self.tiny else ())]

    def config(self, *files: str, overrides: Sequence[str] = ()) -> Config:
        """The job's configuration, from TOML files in configs/."""
        return load_config(Config, [CONFIGS / name for name in files], self.overrides(*overrides))

    def seconds(self, seconds: float) -> float:
        """The time for a measurement: `seconds`, or a fraction of a second in a dry run."""
        return 0.05 if self.tiny else seconds

    def step_settings(self, *, repeats: int = 2, repeat_s: float = 1.0, steps_per_sync: int = 4) -> StepSettings:
        """How long to measure a step. Alternatives to the step are not measured."""
        return StepSettings(
            repeats=repeats,
            repeat_s=self.seconds(repeat_s),
            warmup_s=self.seconds(1),
            steps_per_sync=steps_per_sync,
            comparisons=False,
        )

"""Trains, measures and compares the networks of a study. What is finished is not repeated; each result is a row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from peclr_dali.bench.rows import append, describe_machine, read_rows
from peclr_dali.bench.studies.measure import Claim, Keys, Measured, Row, compare, measure_constants, root_of
from peclr_dali.ranks import described_ranks
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.metrics import METRICS, metric_of
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.log import progress_bar


@dataclass(frozen=True)
class Scale:
    """What all runs of a study share. A run's configuration has the files, these keys, and then its own keys."""

    folder: Path  # of the runs, "small" or "paper". Studies with one folder share runs of the same names
    pretrain: Keys
    finetune: Keys
    held_out: Keys  # choose the images to measure on
    pretrain_files: tuple[Path, ...] = ()
    finetune_files: tuple[Path, ...] = ()
    hands: Mapping[str, Any] | None = None  # arguments of `make_dataset`, if hands are rendered
    overrides: Keys = ()  # over all other keys of every run


@dataclass
class Study:
    """One call of a study. Its function runs twice: first as a plan, which only composes all configurations.

    Attributes:
        name: name of the study's function.
        seeds: train with these, in place of those that the study plans.
        only: arms to train and measure; empty: all.
        record: file for the rows that it does not have yet.
        planned: whether the first call has ended.
        arms: keys of the images on which each arm is measured.
        starts: pre-trainings that arms of this call start from.
        measured: networks of each arm, one for each seed.
        rows: results of this call.
    """

    name: str
    scale: Scale
    seeds: Sequence[int] = ()
    only: Sequence[str] = ()
    record: Path | None = None
    planned: bool = False
    arms: dict[str, Keys] = field(default_factory=dict)
    starts: set[Path] = field(default_factory=set)
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def pretrain(self, arm: str, seed: int, keys: Keys = ()) -> Path:
        """Pre-train, if an arm of this call starts from it. Returns the run's folder."""
        scale, out = self.scale, self.scale.folder / f"seed_{seed}" / f"pretrain_{arm}"
        keys = (*scale.pretrain, *keys, *scale.overrides, f"run.seed={seed}", f"run.out={out}")
        config = load_config(Config, scale.pretrain_files, keys)
        if self.planned and out in self.starts:
            self.starts.remove(out)  # further seeds start from it too
            row: Row = {"kind": "pretrain", "seed": seed, "arm": arm, "set": keys}
            if probes := pretrain(config, "auto").read_validations():  # the linear probe, in pixels of 224
                row["probe_step"] = [probe["step"] for probe in probes]
                row["probe_epe_px"] = [probe["epe_px_of_224"] for probe in probes]
                row["probe_constant_epe_px"] = probes[-1].get("constant_epe_px_of_224")
            self.add(row)
        return out

    def finetune(
        self,
        arm: str,
        seed: int,
        keys: Keys = (),
        start: Path | None = None,
        *,
        network: str | None = None,
        on: Keys | None = None,
        published: Mapping[str, float] | None = None,
        maps: bool = False,
    ) -> None:
        """Fine-tune and measure a network, if this call has the arm.

        Args:
            start: the pre-training whose encoder it starts from, if not from `encoder.weights` as configured.
            network: another arm, whose network is measured here too.
            on: choose the images to measure on, if not those of the scale.
            published: the paper's figures, metric -> value.
            maps: map the equivariance error too.
        """
        scale, out = self.scale, self.scale.folder / f"seed_{seed}" / f"finetune_{network or arm}"
        weights = () if start is None else (f"encoder.weights={start}",)
        keys = (*scale.finetune, *keys, *scale.overrides, f"run.seed={seed}", f"run.out={out}", *weights)
        config = load_config(FinetuneConfig, scale.finetune_files, keys)
        self.arms[arm] = on or scale.held_out
        if self.only and arm not in self.only:
            return
        if not self.planned:
            self.starts.update([] if start is None else [start])
            return
        if described_ranks().world_size > 1:  # the same command without torchrun does what is left
            return
        finetune(config, "auto")
        measured = Measured(arm, seed, start, out, self.arms[arm])
        self.measured.setdefault(arm, []).append(measured)
        errors = {metric: metric_of(table) for metric, table in measured.read("errors").items() if metric in METRICS}
        row = {"kind": "arm", "seed": seed, "arm": arm, "set": keys, "on": root_of(measured.on), **errors}
        self.add({**row, "published": published or {}})
        if maps:
            tables = {name: table.tolist() for name, table in measured.read("map").items()}
            self.add({"kind": "map", "seed": seed, "arm": arm, **tables})

    def compare(self, *claims: Claim) -> None:
        """Check the claims about arms of this call."""
        for claim in claims:
            if claim.better in self.measured and claim.than in self.measured:
                self.add(compare(claim, self.measured[claim.better], self.measured[claim.than]))

    def begin(self) -> None:
        """End the plan: render hands, and measure constant predictions, which shows whether the images are there."""
        self.planned = True
        if self.scale.hands is not None:
            root = Path(self.scale.hands["out"])
            root.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{root}.lock"), progress_bar(f"rendering {root}") as progress:  # another process waits
                make_dataset(progress=progress, **self.scale.hands)
        for on in dict.fromkeys(on for arm, on in self.arms.items() if not self.only or arm in self.only):
            self.add({"kind": "constant", "on": root_of(on), "constants": measure_constants(on)})

    def add(self, row: Row) -> None:
        """Keep a row; record it, unless the file has it or it is a comparison of one trial."""
        self.rows.append(row)
        if self.record is None or math.isinf(row.get("low", 0)):
            return
        study = {"bench": "experiment", "study": self.name, "scale": self.scale.folder.name}
        entry = json.loads(json.dumps({**study, **row}))
        recorded = read_rows(self.record) if self.record.exists() else []
        if not any({**entry, "machine": known["machine"]} == known for known in recorded):
            append(self.record, {**entry, "machine": describe_machine()})

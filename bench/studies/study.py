"""Trains, measures and compares the networks of a study. What is finished is not repeated; each result is a row."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock

from peclr_dali.bench.rows import append, describe_machine, read_rows
from peclr_dali.pipelines.sources import load_index
from peclr_dali.ranks import described_ranks
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.equivariance_maps import equivariance_maps
from peclr_dali.train.evaluation.errors import evaluation_config, evaluation_constants, measure
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.metrics import METRICS, interval_over_runs, metric_of
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.checkpoint import CHECKPOINTS
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.writing import whole_file

Keys = tuple[str, ...]
"""Keys of a configuration with their values, as for `--set`."""
Row = dict[str, Any]


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


class Claim(NamedTuple):
    """The claim that one arm is better than another."""

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None  # the paper's: of the worse arm's error, or of the better arm's AUC


class Measured(NamedTuple):
    """A network that is measured as an arm of a study."""

    arm: str
    seed: int
    start: Path | None  # the pre-training, if it starts from one
    out: Path  # the fine-tuning
    on: Keys  # choose the images to measure on

    def read(self, what: Literal["errors", "map"]) -> dict[str, Any]:
        """The result of `measure_network`, which is kept in a file of the run's folder."""
        file = self.out / f"{what}_{self.arm}.npz"
        if not file.exists():
            with whole_file(file) as opened:
                np.savez(opened, **measure_network(self.out, self.on, what))
        with np.load(file) as saved:
            return dict(saved)


@dataclass
class Study:
    """One call of a study. Its function runs twice: first as a plan, which only composes all configurations."""

    name: str  # of the study's function
    scale: Scale
    seeds: Sequence[int] = ()  # train with these, in place of those that the study plans
    only: Sequence[str] = ()  # arms to train and measure; empty: all
    record: Path | None = None  # file for the rows that it does not have yet
    planned: bool = False  # whether the first call has ended
    arms: dict[str, Keys] = field(default_factory=dict)  # choose the images on which each arm is measured
    starts: set[Path] = field(default_factory=set)  # pre-trainings that arms of this call start from
    measured: dict[str, list[Measured]] = field(default_factory=dict)  # a network of each arm for each seed
    rows: list[Row] = field(default_factory=list)  # results of this call

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
        if start is not None and not self.planned:
            self.starts.add(start)
        if not self.planned or described_ranks().world_size > 1:  # without torchrun, the command does what is left
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

    def finetune_with(self, labels: Mapping[str, Keys], seed: int, starts: Mapping[str, Path | None]) -> None:
        """Fine-tune and measure from each start with each share of the labels: the arms "start_share"."""
        for share, keys in labels.items():
            for start, pretrained in starts.items():
                self.finetune(f"{start}_{share}", seed, keys, pretrained)

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


def measure_network(out: Path, on: Keys, what: Literal["errors", "map"]) -> dict[str, Any]:
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

"""Runs studies: trains, measures and compares their networks. What is finished is not repeated; a result is a row."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from filelock import FileLock

from peclr_dali.bench.commands import record_option
from peclr_dali.bench.rows import append_new, study_tables
from peclr_dali.pipelines.sources import load_index
from peclr_dali.ranks import described_ranks
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.commands.failures import failures
from peclr_dali.train.commands.options import SEED, is_main_rank
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.equivariance_maps import equivariance_maps
from peclr_dali.train.evaluation.errors import evaluation_config, evaluation_constants, measure, trials_of
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.metrics import METRICS, beats_constants, interval_over_runs, metric_of
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.checkpoint import CHECKPOINTS
from peclr_dali.train.runs.log import configure_logging, progress_bar
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
    hands: Sequence[Mapping[str, Any]] = ()  # arguments of `make_dataset` for each set that is rendered
    overrides: Keys = ()  # over all other keys of every run


class Claim(NamedTuple):
    """The claim that one arm is better than another."""

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None  # the paper's: of the worse arm's error, or of the better arm's AUC


class Network(NamedTuple):
    """A network that is fine-tuned and measured as an arm of a study."""

    arm: str
    seed: int
    keys: Keys
    config: FinetuneConfig
    start: Path | None  # the pre-training whose encoder it starts from, if not from `encoder.weights` as configured
    on: Keys  # choose the images to measure on
    published: Mapping[str, float]  # the paper's figures, metric -> value
    maps: bool  # whether the equivariance error is mapped too

    def measured(self) -> dict[str, Any]:
        """The metrics' tables (N, K), "groups" (N,) as for `confidence_intervals`, maps; kept in the run's folder."""
        out = Path(self.config.run.out)
        file = out / f"{'maps' if self.maps else 'errors'}_{self.arm}.npz"
        if not file.exists():
            run = load_pose_run(out / CHECKPOINTS)
            config = evaluation_config(run, (), self.on)
            index = load_index(config.data)
            labels = labels_to_learn(index)
            world = single_process(config.train.device)
            with progress_bar("measuring") as progress:
                poses = estimate_poses(run.network, index, labels.intrinsics, config, world, progress=progress)
            tables: dict[str, Any] = {**measure(run, config, index, labels, poses).errors.tables}
            if self.maps:
                tables |= equivariance_maps(run, config, index, labels)
            with whole_file(file) as opened:
                np.savez(opened, groups=index.groups, **tables)
        with np.load(file) as saved:
            return dict(saved)


@dataclass
class Study:
    """One call of a study. Its function composes all configurations and says what is claimed; then `run` trains."""

    name: str  # of the study's function
    scale: Scale
    seeds: Sequence[int] = ()  # train with these, in place of those of the function
    only: Sequence[str] = ()  # arms to train and measure; empty: all
    record: Path | None = None  # file for the rows that it does not have yet
    pretrainings: dict[Path, tuple[Config, Row]] = field(default_factory=dict)  # by folder, and what is recorded
    networks: list[Network] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # the results

    def pretrain(self, arm: str, seed: int, keys: Keys = ()) -> Path:
        """Pre-train, if an arm of this call starts from it. Returns the run's folder."""
        scale, out = self.scale, self.scale.folder / f"seed_{seed}" / f"pretrain_{arm}"
        keys = (*scale.pretrain, *keys, *scale.overrides, f"run.seed={seed}", f"run.out={out}")
        row = {"kind": "pretrain", "seed": seed, "arm": arm, "set": keys}
        self.pretrainings[out] = load_config(Config, scale.pretrain_files, keys), row
        return out

    def finetune(
        self, arm: str, seed: int, keys: Keys = (), start: Path | None = None, *,
        on: Keys = (), published: Mapping[str, float] = {}, maps: bool = False,
    ) -> Network:  # fmt: skip
        """Fine-tune and measure a network, if this call has the arm. Arguments as in `Network`."""
        scale, out = self.scale, self.scale.folder / f"seed_{seed}" / f"finetune_{arm}"
        weights = () if start is None else (f"encoder.weights={start}",)
        keys = (*scale.finetune, *keys, *scale.overrides, f"run.seed={seed}", f"run.out={out}", *weights)
        config = load_config(FinetuneConfig, scale.finetune_files, keys)
        network = Network(arm, seed, keys, config, start, on or scale.held_out, published, maps)
        self.networks.append(network)
        return network

    def measure(self, arm: str, network: Network, on: Keys, published: Mapping[str, float]) -> None:
        """Measure a network on other images too."""
        self.networks.append(network._replace(arm=arm, on=on, published=published, maps=False))

    def finetune_with(self, labels: Mapping[str, Keys], seed: int, starts: Mapping[str, Path | None]) -> None:
        """Fine-tune and measure from each start with each share of the labels: the arms "start_share"."""
        for share, keys in labels.items():
            for start, pretrained in starts.items():
                self.finetune(f"{start}_{share}", seed, keys, pretrained)

    def compare(self, *claims: Claim) -> None:
        """Check the claims about arms of this call."""
        self.claims += claims

    def run(self) -> None:
        """Train, measure and compare. Under torchrun only pre-train: a call without it does what is left."""
        for hands in self.scale.hands:
            root = Path(hands["out"])
            root.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{root}.lock"), progress_bar(f"rendering {root}") as progress:  # another process waits
                make_dataset(progress=progress, **hands)
        chosen = [network for network in self.networks if not self.only or network.arm in self.only]
        for on in dict.fromkeys(network.on for network in chosen):
            self.add(measure_constants(on))  # which shows whether the images are there
        alone = described_ranks().world_size == 1
        for network in chosen:
            if network.start in self.pretrainings:
                config, row = self.pretrainings.pop(network.start)  # other networks start from it too
                if probes := pretrain(config, "auto").read_validations():  # the linear probe, in pixels of 224
                    row["probe_step"] = [probe["step"] for probe in probes]
                    row["probe_epe_px"] = [probe["epe_px_of_224"] for probe in probes]
                    row["probe_constant_epe_px"] = probes[-1].get("constant_epe_px_of_224")
                self.add(row)
            if not alone:
                continue
            finetune(network.config, "auto")
            row = {"kind": "arm", "seed": network.seed, "arm": network.arm, "set": network.keys}
            row |= {"on": measure_constants(network.on)["on"], "published": network.published}
            for name, table in network.measured().items():
                if name != "groups":
                    row[name] = metric_of(table) if name in METRICS else table
            self.add(row)
        for claim in self.claims:
            better, than = ([network for network in chosen if network.arm == arm] for arm in claim[:2])
            if alone and better and than:
                self.add(compare(claim, better, than))

    def add(self, row: Row) -> None:
        """Keep a row; record it, unless the file has it or it is a comparison of one trial."""
        self.rows.append(row)
        if self.record is not None and not math.isinf(row.get("low", 0)):
            append_new(self.record, {"bench": "experiment", "study": self.name, "scale": self.scale.folder.name, **row})


@cache
def measure_constants(on: Keys) -> Row:
    """A row with errors of constant predictions on the images that keys choose, see train/evaluation/errors.py."""
    data = load_config(FinetuneConfig, (), on).data
    index = load_index(data)
    return {"kind": "constant", "on": data[0].root, "constants": evaluation_constants(index, labels_to_learn(index))}


def compare(claim: Claim, better: Sequence[Network], than: Sequence[Network]) -> Row:
    """A row that checks a claim about two arms that are measured with the same seeds on the same images.

    "differences" are first minus second. The claim "holds" if the whole 95 % interval of their mean is on the better
    side of zero. It counts only if both arms are better than all constants: "beats_constants", None if there are none.
    "better_by_percent" is relative to the second arm's error, or to the first arm's AUC, as in the paper.
    """
    metric = claim.metric
    ours, theirs = ([network.measured() for network in arm] for arm in (better, than))
    tables = [first[metric] - second[metric] for first, second in zip(ours, theirs, strict=True)]
    trials = trials_of((first.config, second.config) for first, second in zip(better, than, strict=True))
    mean, low, high = interval_over_runs(tables, trials, ours[0]["groups"])
    levels = [float(np.mean([metric_of(errors[metric]) for errors in arm])) for arm in (ours, theirs)]
    beats = [beats_constants(level, metric, measure_constants(better[0].on)["constants"]) for level in levels]
    sign = 1 if METRICS[metric].higher_is_better else -1
    return {
        "kind": "comparison", "better": claim.better, "than": claim.than, "metric": metric,
        "differences": [metric_of(table) for table in tables], "mean": mean, "low": low, "high": high,
        "holds": min(sign * low, sign * high) > 0,
        "better_by_percent": 100 * sign * mean / levels[0 if sign > 0 else 1],
        "published_percent": claim.percent, "beats_constants": None if None in beats else all(beats),
        "seeds": [network.seed for network in better],
    }  # fmt: skip


Studies = Mapping[str, Mapping[Callable[[Study], None], Scale]]
"""For "small" and "paper", the functions of the studies of a file, each with what its runs share."""


def main(studies: Studies) -> None:
    """The command of a file."""
    scales = "small: rendered hands and minutes on a CPU for each run; paper: the paper's datasets and settings."
    names = click.Choice(sorted({function.__name__ for chosen in studies.values() for function in chosen}))

    @click.command(help=f"Run studies: {', '.join(names.choices)}. An interrupted study continues where it stopped.")
    @click.option("--scale", type=click.Choice([*studies]), default=next(iter(studies)), show_default=True, help=scales)
    @click.option("--study", "chosen", type=names, multiple=True, help="Run only this one; repeatable.")
    @click.option("--arm", "arms", multiple=True, metavar="NAME", help="Run only this arm; repeatable.")
    @click.option("--seeds", metavar="0,1,...", callback=_numbers, help="Run these; other processes can run others.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key of every run.")
    @click.option("-c", "files", multiple=True, type=Path, help="A file over those of pre-training: cards/h100.")
    @record_option
    @failures()
    def command(
        scale: str, chosen: Sequence[str], arms: Sequence[str], seeds: Sequence[int], overrides: tuple[str, ...],
        files: tuple[Path, ...], record: Path | None,
    ) -> None:  # fmt: skip
        plans = []
        for function, shared in studies[scale].items():
            if function.__name__ in (chosen or names.choices):
                changed = replace(shared, pretrain_files=(*shared.pretrain_files, *files), overrides=overrides)
                plans.append(Study(function.__name__, changed, seeds, arms, record if is_main_rank() else None))
                function(plans[-1])  # only composes configurations: a mistake ends the command before any work
        known = dict.fromkeys(network.arm for study in plans for network in study.networks)
        if unknown := [arm for arm in arms if arm not in known]:
            raise click.BadParameter(f"there is no arm {unknown[0]!r}; expected one of {', '.join(known)}")
        for study in plans:
            study.run()
            if any(row["kind"] == "arm" for row in study.rows):
                click.echo(f"\n{study.name}, scale {scale}\n\n{study_tables(study.rows)}")

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as for the other commands (docs/performance.md)
    configure_logging()
    command()


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    return [SEED(number, option, context) for number in (text or "").split(",") if number]

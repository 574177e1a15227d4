"""What a study is: the networks that it trains and measures, their runs, and the claims that it checks."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from peclr_dali.bench.studies.scales import Dataset, Keys, Scale
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.read_out import fit_read_out

ScaleName = Literal["small", "paper"]
SCALES: Final[tuple[ScaleName, ...]] = ("small", "paper")


@dataclass(frozen=True)
class Arm:
    """One way to pre-train, or one network that is measured."""

    keys: Keys = ()  # over those of the scale
    data: Sequence[Dataset] = ()  # to train on, if not the scale's; only pre-training takes several
    published: Mapping[str, float] = field(default_factory=dict)  # the paper's figures: metric -> value

    # Of a measured arm:
    start: str | None = None  # the pre-training whose encoder it starts from, if not as configured
    by: Literal["finetune", "probe"] = "finetune"  # "probe": a linear head on the frozen encoder, in closed form
    network: str | None = None  # another measured arm, whose network is measured on `on`; nothing is trained
    on: Dataset | None = None  # to measure on, if not the dataset of the training


class Claim(NamedTuple):
    """The claim that one measured arm is better than another."""

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None  # the paper's: of the worse arm's error, or of the better arm's AUC


class Run(NamedTuple):
    """A run of one seed: its command, the files and keys of its configuration, and its folder."""

    command: Literal["pretrain", "finetune", "probe"]
    files: Sequence[str]
    keys: list[str]
    out: Path

    @property
    def config(self) -> Any:
        """The configuration."""
        kind = Config if self.command == "pretrain" else FinetuneConfig
        return load_config(kind, [Path(file) for file in self.files], self.keys)

    def train(self) -> None:
        """Do the run, or the rest of it, unless it is finished."""
        functions: dict[str, Any] = {"pretrain": pretrain, "finetune": finetune, "probe": fit_read_out}
        functions[self.command](self.config, "auto")

    def shell_command(self, processes: int) -> str:
        """A command that does the same; with several processes, if it is a pre-training whose batch allows it."""
        launcher, train = ["python"], self.config.train
        if self.command == "pretrain" and (most := min(processes, train.batch // train.micro_batch)) > 1:
            launcher = ["torchrun", f"--nproc-per-node={most}"]
        options = [("-c", file) for file in self.files] + [("--set", key) for key in self.keys]
        words = [word for option in options for word in option]
        return shlex.join([*launcher, "-m", "peclr_dali", self.command, *words, "--resume", "auto"])


@dataclass(frozen=True)
class Study:
    """Networks trained in several ways with several seeds, and compared in pairs."""

    name: str
    at: Scale
    folder: Path  # of the runs; its last part is the scale. Studies with one folder share runs of the same names
    measured: Mapping[str, Arm]
    pretrain: Mapping[str, Arm] = field(default_factory=dict)
    compare: Sequence[Claim] = ()
    maps: bool = False  # whether to map the equivariance error of the measured arms too
    seeds: Sequence[int] = (0, 1, 2)  # of order, augmentation, weights and labels; all arms run once per seed
    pretrain_seeds: int | None = None  # seed s starts from the pre-training of s modulo this number; None: of s

    def only(self, names: Collection[str]) -> Study:
        """The study with these measured arms, if it has them, and those whose networks they measure."""
        kept = {*names, *(arm.network for name, arm in self.measured.items() if name in names)}
        return replace(
            self,
            measured={name: arm for name, arm in self.measured.items() if name in kept},
            compare=[claim for claim in self.compare if {claim.better, claim.than} <= kept],
        )

    def start_seed(self, seed: int) -> int:
        """Seed of the pre-training from which the networks of a seed start."""
        return seed if self.pretrain_seeds is None else seed % self.pretrain_seeds

    def pretraining(self, name: str, seed: int) -> Run:
        """The pre-training from which the networks of a seed start."""
        start = self.start_seed(seed)
        out = self.folder / f"seed_{start}" / f"pretrain_{name}"
        keys = self._keys(self.pretrain[name], self.at.pretrain, start, out)
        return Run("pretrain", self.at.pretrain_files, keys, out)

    def measurement(self, name: str, seed: int) -> Run:
        """The fine-tuning or read-out that makes the network of a measured arm."""
        trained = self.measured[name].network or name
        arm = self.measured[trained]
        out = self.folder / f"seed_{seed}" / f"{arm.by}_{trained}"
        keys = self._keys(arm, self.at.measured, seed, out)
        keys += [] if arm.start is None else [f"encoder.weights={self.pretraining(arm.start, seed).out}"]
        return Run(arm.by, self.at.measured_files, keys, out)

    def runs(self) -> Iterator[tuple[str, int, Run]]:
        """Arm, seed and run of everything to do, each after what it starts from."""
        starts, seen = {arm.start for arm in self.measured.values()}, set[Path]()
        for seed in self.seeds:
            for name in self.pretrain:
                run = self.pretraining(name, seed)
                if name in starts and run.out not in seen:
                    yield name, self.start_seed(seed), run
                seen.add(run.out)
            yield from ((name, seed, self.measurement(name, seed)) for name in self.measured)

    def measured_on(self, name: str) -> Dataset:
        """The dataset on which an arm is measured."""
        arm = self.measured[name]
        return arm.on or [*self.measured[arm.network or name].data, self.at.data][0]

    def held_out(self, name: str) -> list[str]:
        """Keys that choose the images on which an arm is measured."""
        data = self.measured_on(name)
        return [f"data.root={data.root}", *data.keys, *data.held_out]

    def _keys(self, arm: Arm, shared: Keys, seed: int, out: Path) -> list[str]:
        """All keys of a run. Each of several datasets gets the keys of `data` that it would get alone."""
        keys = [*shared, *arm.keys, f"run.seed={seed}", f"run.out={out}"]
        for_each = [[f"data.root={data.root}", *data.keys] for data in arm.data or (self.at.data,)]
        if len(for_each) == 1:
            return [*for_each[0], *keys]
        of_all = [key for key in keys if key.startswith("data.")]
        numbered = [
            key.replace("data.", f"data.{number}.", 1)
            for number, of_one in enumerate(for_each)
            for key in (*of_one, *of_all)
        ]
        return [f"data=[{', '.join('{}' for _ in for_each)}]", *numbered, *(key for key in keys if key not in of_all)]


Studies = Mapping[ScaleName, Sequence[Study]]
"""The studies of a file, by scale."""

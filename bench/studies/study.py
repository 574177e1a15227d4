"""What a study is: the networks that it trains and measures, their configurations, and the claims that it checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from peclr_dali.bench.studies.scales import Dataset, Keys, Scale
from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config

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
        """The study with these measured arms, and those whose networks they measure. An unknown one is a UserError."""
        if unknown := [name for name in names if name not in self.measured]:
            raise UserError(f"{self.name} has no arm {unknown[0]!r}; expected one of {', '.join(self.measured)}")
        kept = {*names, *(self.measured[name].network for name in names)}
        return replace(
            self,
            measured={name: arm for name, arm in self.measured.items() if name in kept},
            compare=[claim for claim in self.compare if {claim.better, claim.than} <= kept],
        )

    def runs(self) -> Iterator[tuple[Literal["pretrain", "measured"], str, int]]:
        """Kind, arm and seed of everything to run, seed by seed, each after what it starts from."""
        starts, begun = {arm.start for arm in self.measured.values()}, set[int]()
        for seed in self.seeds:
            if (start_seed := self.start_seed(seed)) not in begun:
                yield from (("pretrain", name, start_seed) for name in self.pretrain if name in starts)
            begun.add(start_seed)
            yield from (("measured", name, seed) for name in self.measured)

    def start_seed(self, seed: int) -> int:
        """Seed of the pre-training from which the networks of a seed start."""
        return seed if self.pretrain_seeds is None else seed % self.pretrain_seeds

    def pretrained(self, name: str, seed: int) -> Path:
        """Folder of the pre-training from which the networks of a seed start."""
        return self.folder / f"seed_{self.start_seed(seed)}" / f"pretrain_{name}"

    def run_of(self, name: str, seed: int) -> Path:
        """Folder of the network of a measured arm."""
        trained = self.measured[name].network or name
        return self.folder / f"seed_{seed}" / f"{self.measured[trained].by}_{trained}"

    def measured_on(self, name: str) -> Dataset:
        """The dataset on which an arm is measured."""
        arm = self.measured[name]
        return arm.on or [*self.measured[arm.network or name].data, self.at.data][0]

    def held_out(self, name: str) -> list[str]:
        """Keys that choose the images on which an arm is measured."""
        data = self.measured_on(name)
        return [f"data.root={data.root}", *data.keys, *data.held_out]

    def pretraining(self, name: str, seed: int) -> tuple[Config, list[str]]:
        """The configuration of a pre-training, and the keys that it sets over `at.pretrain_files`."""
        keys = self._keys(self.pretrain[name], self.at.pretrain, seed, self.pretrained(name, seed))
        return load_config(Config, list(map(Path, self.at.pretrain_files)), keys), keys

    def measurement(self, name: str, seed: int) -> tuple[FinetuneConfig, list[str]]:
        """The configuration of a fine-tuning or read-out, and the keys that it sets over `at.measured_files`."""
        arm = self.measured[name]
        keys = self._keys(arm, self.at.measured, seed, self.run_of(name, seed))
        keys += [] if arm.start is None else [f"encoder.weights={self.pretrained(arm.start, seed)}"]
        return load_config(FinetuneConfig, list(map(Path, self.at.measured_files)), keys), keys

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

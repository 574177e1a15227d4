"""A study at one scale: which networks are pre-trained, with which settings, and how they are measured and compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from peclr_dali.bench.studies.scales import Dataset, Keys, Scale
from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config

ScaleName = Literal["small", "paper"]
By = Literal["finetune", "probe"]
SCALES: Final[tuple[ScaleName, ...]] = ("small", "paper")


@dataclass(frozen=True)
class Arm:
    """One way to pre-train, or one network that is measured.

    Attributes:
        keys: keys of the run's configuration, applied after the shared ones.
        data: the datasets to train on, if not the scale's. Only pre-training takes several.
        start: of a measured arm: the pre-training whose encoder it starts from; None: as configured.
        by: of a measured arm: fine-tuning with a head, or a read-out ("probe"): a linear head on the frozen encoder,
            fitted in closed form.
        network: another measured arm, whose network is measured on this arm's data; nothing is trained.
        on: the dataset to measure on, if not that of the training.
        published: the paper's figures: metric -> value.
    """

    keys: Sequence[str] = ()
    data: tuple[Dataset, ...] = ()
    start: str | None = None
    by: By = "finetune"
    network: str | None = None
    on: Dataset | None = None
    published: Mapping[str, float] = field(default_factory=dict)


class Claim(NamedTuple):
    """The claim that one measured arm is better than another; or, without claim, their comparison.

    Attributes:
        better: the first arm.
        than: the second one.
        metric: the error or AUC that is compared.
        percent: the paper's improvement, in percent of the worse arm's error, or of the better arm's AUC.
    """

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None


@dataclass(frozen=True)
class Study:
    """Networks trained in several ways with several seeds, and compared in pairs.

    Attributes:
        name: its name in rows, and for `--study`.
        at: what its arms share.
        measured: the networks that are measured.
        pretrain: the pre-trainings.
        compare: the claims.
        maps: two arms whose equivariance errors are mapped: the one that the paper says is better, and the other.
        folder: of the runs. Studies with the same folder share the runs of arms with the same names.
        seeds: seeds of order, augmentation, weights and labels; all arms run once per seed.
        pretrain_seeds: the networks of seed s start from the pre-training of seed s modulo this number. None: each seed
            has a pre-training of its own.
    """

    name: str
    at: Scale
    measured: Mapping[str, Arm]
    folder: Path
    pretrain: Mapping[str, Arm] = field(default_factory=dict)
    compare: Sequence[Claim] = ()
    maps: tuple[str, str] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    pretrain_seeds: int | None = None

    def only(self, names: Collection[str]) -> Study:
        """The study with these measured arms, those whose networks they measure, and what all of them start from.

        Raises:
            UserError: there is no such arm.
        """
        for name in names:
            if name not in self.measured:
                raise UserError(f"{self.name} has no arm {name!r}; expected one of {', '.join(self.measured)}")
        networks = {self.measured[name].network for name in names}
        measured = {name: arm for name, arm in self.measured.items() if name in {*names, *networks}}
        starts = {arm.start for arm in measured.values()}
        return replace(
            self,
            measured=measured,
            pretrain={name: arm for name, arm in self.pretrain.items() if name in starts},
            compare=[claim for claim in self.compare if {claim.better, claim.than} <= measured.keys()],
            maps=self.maps if {*(self.maps or ())} <= measured.keys() else None,
        )

    def start_seed(self, seed: int) -> int:
        """Seed of the pre-training from which the networks of a seed start."""
        return seed if self.pretrain_seeds is None else seed % self.pretrain_seeds

    def run_of(self, name: str, seed: int) -> Path:
        """Folder of the network of a measured arm."""
        trained = self.measured[name].network or name
        return self.folder / f"seed_{seed}" / f"{self.measured[trained].by}_{trained}"

    def pretrained(self, name: str, seed: int) -> Path:
        """Folder of the pre-training from which the networks of a seed start."""
        return self.folder / f"seed_{self.start_seed(seed)}" / f"pretrain_{name}"

    def measured_on(self, name: str) -> Dataset:
        """The dataset on which an arm is measured."""
        arm = self.measured[name]
        return arm.on or (self.measured[arm.network or name].data or (self.at.data,))[0]

    def held_out(self, name: str) -> list[str]:
        """Keys that choose the images on which an arm is measured."""
        data = self.measured_on(name)
        return [f"data.root={data.root}", *data.keys, *data.held_out]

    def datasets(self) -> list[Dataset]:
        """The datasets that are trained or measured on."""
        trained = [one for arm in (*self.pretrain.values(), *self.measured.values()) for one in arm.data]
        return list({one.root: one for one in (self.at.data, *trained, *map(self.measured_on, self.measured))}.values())

    def pretraining(self, name: str, seed: int) -> tuple[Config, list[str]]:
        """The configuration of a pre-training, and the keys that it sets over `at.pretrain_files`."""
        keys = self._keys(self.pretrain[name], self.at.pretrain, seed, self.pretrained(name, seed))
        return load_config(Config, [Path(file) for file in self.at.pretrain_files], keys), keys

    def measurement(self, name: str, seed: int) -> tuple[FinetuneConfig, list[str]]:
        """The configuration of a fine-tuning or read-out, and the keys that it sets over `at.measured_files`."""
        arm = self.measured[name]
        keys = self._keys(arm, self.at.measured, seed, self.run_of(name, seed))
        keys += [] if arm.start is None else [f"encoder.weights={self.pretrained(arm.start, seed)}"]
        return load_config(FinetuneConfig, [Path(file) for file in self.at.measured_files], keys), keys

    def _keys(self, arm: Arm, shared: Keys, seed: int, folder: Path) -> list[str]:
        keys, datasets = [*shared, *arm.keys], arm.data or (self.at.data,)
        for_each = [[f"data.root={data.root}", *data.keys] for data in datasets]
        if len(datasets) == 1:
            keys = [*for_each[0], *keys]
        else:  # each is as it would be alone
            of_data = [key for key in keys if key.startswith("data.")]
            keys = [
                f"data=[{', '.join('{}' for _ in datasets)}]",
                *(
                    key.replace("data.", f"data.{number}.", 1)
                    for number, of_one in enumerate(for_each)
                    for key in (*of_one, *of_data)
                ),
                *(key for key in keys if key not in of_data),
            ]
        return [*keys, f"run.seed={seed}", f"run.out={folder}"]


Studies = Mapping[ScaleName, Sequence[Study]]
"""The studies of a file, by scale."""

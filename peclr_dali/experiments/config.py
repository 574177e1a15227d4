"""The configuration of a study; like every configuration, it imports neither torch nor DALI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from annotated_types import Interval
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import Count, Number, Seed
from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, each_source, is_address, refuse_among_images
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import as_toml, to_dict

C = TypeVar("C", Config, FinetuneConfig)

MetricName = Literal["epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"]
ScaleName = Literal["small", "paper"]
By = Literal["finetune", "probe"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Render:
    """Hands that `make-data` renders, if their folder does not exist. The attributes are its options."""

    poses: Annotated[Count, Field(ge=10)]
    seed: Seed = 0
    scenes: Count = 40
    sequences: Annotated[int, Field(ge=0)] = 0  # films in HO-3D's layout instead of FreiHAND's


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Dataset:
    """Images that arms name.

    "{seed}" in a key stands for the seed, also in the keys of arms: to hold out other people with each seed.

    Attributes:
        root: their folder.
        set: further keys of `data`, as for `--set`.
        held_out: the keys of `data` that choose the images to measure on.
        render: what to render if the folder does not exist; None: the folder has to exist.
    """

    root: str
    set: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ("data.part=evaluation", "data.split=all")
    render: Render | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Shared:
    """What the arms of one kind share: TOML files, as `-c` takes them, and keys, as for `--set`.

    As everywhere, relative paths count from the current folder.
    """

    config: tuple[Path, ...] = ()
    set: tuple[str, ...] = ()


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Scale:
    """The size at which a study is run.

    Attributes:
        data: the datasets, by the names that arms use. The first is the default.
        pretrain: shared by the arms of pre-training.
        measured: shared by the arms that are measured.
        by: how an encoder is measured: by fine-tuning with a head, or by a read-out (`probe`): a linear head on the
            frozen encoder, fitted in closed form.
        processes: processes of pre-training in the commands that `--list` prints, if a batch has as many micro-batches.
    """

    data: Annotated[dict[str, Dataset], Field(min_length=1)]
    pretrain: Shared = Shared()
    measured: Shared = Shared()
    by: By = "finetune"
    processes: Count = 1


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arm:
    """One way to pre-train.

    Attributes:
        set: keys of the run's configuration, as for `--set`, applied after the shared ones.
        set_at: further keys at one scale.
        data: datasets to train on.
        only: the only scale with this arm; None: all.
    """

    set: tuple[str, ...] = ()
    set_at: dict[ScaleName, tuple[str, ...]] = Field(default_factory=dict)
    data: tuple[str, ...] = ()
    only: ScaleName | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MeasuredArm(Arm):
    """One network that is measured. The other attributes as in `Arm`.

    Attributes:
        start: the pre-training arm whose encoder is taken, or else the measured arm of this name, which comes earlier;
            None: as configured.
        by: as in `Scale`; None: as at the scale.
        network: another arm, whose network is measured on this arm's data; nothing is trained.
        on: dataset to measure on; None: that of the training.
        published: the paper's figures.
    """

    data: Annotated[tuple[str, ...], Field(max_length=1)] = ()
    start: str | None = None
    by: By | None = None
    network: str | None = None
    on: str | None = None
    published: dict[MetricName, Number] = Field(default_factory=dict)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Claim:
    """The claim that one measured arm is better than another in a metric.

    Attributes:
        title: the comparison in plain words, for pictures.
        percent: the paper's improvement, in percent of the worse arm's value.
        claimed: whether the paper says so; False: the arms are only compared.
    """

    better: str
    than: str
    metric: MetricName = "pa_epe_cm"
    percent: Number | None = None
    claimed: bool = True
    title: str | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Maps:
    """Maps of the equivariance error of two arms (paper, supplement, "Inspecting equivariance").

    Attributes:
        better: the arm that the paper says is better at every place of the maps.
        than: the other arm.
        title: the comparison in plain words, for the picture.
        rotations: number of angles in [-80, 80] degrees.
        translations: number of shifts in [-25, 25] pixels of 128, along each axis.
    """

    better: str
    than: str
    title: str | None = None
    rotations: Annotated[int, Interval(ge=2, le=1000)] = 17
    translations: Annotated[int, Interval(ge=2, le=100)] = 5


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """A study: networks trained in several ways with several seeds, and compared in pairs.

    Attributes:
        title: what is compared.
        source: where the paper has it.
        note: what the paper leaves out, such as numbers.
        arms: the networks that are measured.
        scales: the settings of each size.
        pretrain: the pre-training arms.
        compare: the claims.
        maps: maps of the equivariance error.
        seeds: seeds of order, augmentation, weights and labels; all arms run once per seed.
        pretrain_seeds: number of seeds with which an arm is pre-trained; the networks of seed s start from the
            pre-training of seed s modulo this number. None: each seed has a pre-training of its own.
        out: folder of the runs; None: runs/studies and the file's name. Studies with the same folder share the runs of
            arms with the same names.
    """

    title: str
    source: str
    arms: Annotated[dict[str, MeasuredArm], Field(min_length=1)]
    scales: dict[ScaleName, Scale]
    note: str | None = None
    pretrain: dict[str, Arm] = Field(default_factory=dict)
    compare: tuple[Claim, ...] = ()
    maps: Maps | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1, 2)
    pretrain_seeds: Count | None = None
    out: Path | None = None


class Plan:
    """A study at one scale: which arms run, with which settings, in which folders.

    Args:
        file: the study's file; its name without the ending names the study.
        study: what it holds.
        scale: the scale.
        only: the measured arms to run, besides those whose networks they measure or start from; none: all of the study.

    Attributes:
        name: name of the study.
        at: the settings of the scale.
        pretrain: the pre-training arms that the measured ones start from.
        arms: the measured arms.
        compare: the claims about these arms.
        maps: the maps, if both of their arms are among these.
        first_arm: the first measured arm of the study at this scale, whether it runs or not.

    Raises:
        UserError: the study has no such scale, no arm at this scale, or not this arm.
    """

    def __init__(self, file: Path, study: Study, scale: ScaleName, only: Sequence[str] = ()) -> None:
        if scale not in study.scales:
            raise UserError(f"{file}: has no scale {scale!r}; expected --scale {' or '.join(study.scales)}")
        self.file, self.study, self.scale, self.name = file, study, scale, file.stem
        self.at = study.scales[scale]
        self.out = (study.out or Path("runs/studies") / self.name) / scale
        self._all_arms = arms_at(scale, study.arms)
        if not self._all_arms:
            raise UserError(f"{file}: has no arm at scale {scale}: add one to arms, or remove scales.{scale}")
        for name in only:
            _require(f"{file}: at scale {scale}: --arm", name, self._all_arms, "arms")
        self.first_arm = next(iter(self._all_arms))
        wanted = list(only or self._all_arms)
        for name in wanted:  # grows
            start = self._all_arms[name].start
            others = (self._all_arms[name].network, None if start in study.pretrain else start)
            wanted += [other for other in others if other in self._all_arms]
        self.arms = {name: arm for name, arm in self._all_arms.items() if name in wanted}
        starts = {arm.start for arm in self.arms.values()}
        self.pretrain = {name: arm for name, arm in arms_at(scale, study.pretrain).items() if name in starts}
        self.compare = tuple(claim for claim in study.compare if {claim.better, claim.than} <= self.arms.keys())
        maps = study.maps
        self.maps = maps if maps is not None and {maps.better, maps.than} <= self.arms.keys() else None

    def folder(self, seed: int, kind: str, name: str) -> Path:
        """Folder of an arm's run of this kind: "pretrain", "finetune", "probe", and others."""
        return self.out / f"seed_{seed}" / f"{kind}_{name}"

    def pretrain_seed(self, seed: int) -> int:
        """Seed of the pre-training from which the networks of a seed start."""
        return seed if self.study.pretrain_seeds is None else seed % self.study.pretrain_seeds

    def pretrained(self, name: str, seed: int) -> Path:
        """Folder of the run of the arm `name` from which the networks of a seed start."""
        if name not in self.pretrain:
            return self.run_of(name, seed)
        return self.folder(self.pretrain_seed(seed), "pretrain", name)

    def run_of(self, name: str, seed: int) -> Path:
        """Folder of the network of a measured arm."""
        trained = self.arms[name].network or name
        return self.folder(seed, self.by(trained), trained)

    def by(self, name: str) -> By:
        """How a measured arm's encoder is measured."""
        return self.arms[name].by or self.at.by

    def measured_on(self, name: str) -> str:
        """Name of the dataset on which an arm is measured."""
        arm = self._all_arms[name]
        return arm.on or self._datasets(self._all_arms[arm.network or name])[0]

    def held_out(self, name: str, seed: int) -> list[str]:
        """Overrides that choose the images on which an arm is measured."""
        dataset = self.at.data[self.measured_on(name)]
        return of_seed([f"data.root={as_toml(dataset.root)}", *dataset.set, *dataset.held_out], seed)

    def used_data(self) -> dict[str, Dataset]:
        """The datasets that are trained or measured on, by name."""
        arms = [*self.pretrain.values(), *self.arms.values()]
        used = {name for arm in arms for name in self._datasets(arm)} | {self.measured_on(name) for name in self.arms}
        return {name: dataset for name, dataset in self.at.data.items() if name in used}

    def settings(self, kind: type[C], name: str, seed: int) -> tuple[C, list[str]]:
        """The configuration of a run, and the keys that it sets over the files of its kind. Errors as `load_config`."""
        table, arms, shared, by = (
            ("pretrain", self.pretrain, self.at.pretrain, "pretrain")
            if kind is Config
            else ("arms", self.arms, self.at.measured, self.by(name))
        )
        arm: Arm = arms[name]
        own: dict[str, str | int] = {"run.seed": seed, "run.out": str(self.folder(seed, by, name))}
        if isinstance(arm, MeasuredArm) and arm.start is not None:
            own["encoder.weights"] = str(self.pretrained(arm.start, seed))
        try:
            keys = of_seed(self._data_keys(arm, shared, seed), seed)
            keys += [f"{key}={as_toml(value)}" for key, value in own.items()]
            return load_config(kind, shared.config, keys), keys
        except UserError as error:
            here = f". A study's paths count from the current folder, {Path.cwd()}: run it in the checkout"
            hint = "" if all(file.exists() for file in shared.config) else here
            raise UserError(f"{self.file}: {table}.{name} at scale {self.scale}: {error}{hint}") from error

    def require_folders(self) -> None:
        """Raise a `UserError` if images, or tables of pairs, are missing."""
        for name, data in self.used_data().items():
            if data.render is None and not is_address(data.root) and not Path(data.root).is_dir():
                key = f"scales.{self.scale}.data.{name}"
                raise UserError(
                    f"{data.root}: no such folder; expected the images of {key}. Put them there, or set {key}.root"
                )
        for name in self.pretrain:
            for source in each_source(self.settings(Config, name, self.study.seeds[0])[0].data):
                if source.positive == "file" and source.pairs is not None and not Path(source.pairs).exists():
                    raise UserError(
                        f"{self.file}: pretrain.{name}: data.pairs = {source.pairs!r} does not exist; expected a table "
                        "of the command mine. The study's first lines may say how; --arm runs the other arms alone"
                    )

    def require_outside(self) -> None:
        """Raise a `UserError` if a run would write among the images that it reads."""
        for name in self.pretrain:
            refuse_among_images(self.out, self.settings(Config, name, self.study.seeds[0])[0].data)

    def _datasets(self, arm: Arm) -> tuple[str, ...]:
        return arm.data or (next(iter(self.at.data)),)

    def _data_keys(self, arm: Arm, shared: Shared, seed: int) -> list[str]:
        """The keys that an arm sets, with its datasets. Several datasets are each as they would be alone."""
        keys = [*shared.set, *arm.set, *arm.set_at.get(self.scale, ())]
        for key in keys:
            if key.partition("=")[0].strip() in ("run.out", "run.seed"):
                raise UserError(f"set has {key}, which the study chooses: leave it out, and set its out or seeds")
        datasets = [self.at.data[name] for name in self._datasets(arm)]
        for_each = [[f"data.root={as_toml(dataset.root)}", *dataset.set, *keys] for dataset in datasets]
        if len(for_each) == 1:
            return for_each[0]
        defaults = to_dict(DataConfig())
        tables = [to_dict(load_config(Config, shared.config, of_seed(of_one, seed)).data) for of_one in for_each]
        return [
            f"data=[{', '.join('{}' for _ in tables)}]",
            *(
                f"data.{number}.{key}={as_toml(value)}"
                for number, table in enumerate(tables)
                for key, value in table.items()
                if value != defaults.get(key)
            ),
            *(key for key in keys if not key.startswith("data.")),
        ]


def load_study(file: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study's TOML file.

    Raises:
        UserError: the file cannot be read, an arm or dataset does not exist or cannot name a folder, an arm is compared
            with itself, a seed appears twice, or an arm's configuration is wrong at any scale.
    """
    study = load_config(Study, [file], overrides)
    if study.pretrain_seeds is not None and "{seed}" in repr(study):
        raise UserError(
            f"{file}: has pretrain_seeds and a key with {{seed}}: a network could be measured on what its pre-training "
            "saw. Leave one of the two out"
        )
    if len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"{file}: seeds = {list(study.seeds)}: expected each seed once")
    for table, arms in (("pretrain", study.pretrain), ("arms", study.arms)):
        for name in arms:
            if not re.fullmatch(r"[\w-]+", name):
                raise UserError(f"{file}: {table}.{name!r} names a folder: expected letters, digits, - and _")
    pairs: list[tuple[str, Claim | Maps]] = [("compare", claim) for claim in study.compare]
    pairs += [("maps", study.maps)] if study.maps is not None else []
    for key, pair in pairs:
        for name in (pair.better, pair.than):
            _require(f"{file}: {key} names", name, study.arms, "arms")
        if pair.better == pair.than:
            raise UserError(f"{file}: {key}: {pair.better!r} is compared with itself: expected two arms")
    for scale in study.scales:
        _check(Plan(file, study, scale))
    return study


def _check(plan: Plan) -> None:
    """Raise a `UserError` for the first wrong arm or claim at a scale."""
    here, pretraining = f"{plan.file}: at scale {plan.scale}:", arms_at(plan.scale, plan.study.pretrain)
    for name, one in (*pretraining.items(), *plan.arms.items()):
        for dataset in one.data:
            _require(f"{here} {name}.data =", dataset, plan.at.data, "data")
    for name, arm in plan.arms.items():
        if arm.start not in pretraining:
            earlier = list(plan.arms)[: list(plan.arms).index(name)]
            _require(
                f"{here} arms.{name}.start =",
                arm.start,
                dict.fromkeys((*pretraining, *earlier)),
                "pretrain, or an earlier arm",
            )
        _require(f"{here} arms.{name}.network =", arm.network, plan.arms, "arms")
        _require(f"{here} arms.{name}.on =", arm.on, plan.at.data, "data")
        if arm.network is not None:
            trained = arm.set or arm.set_at.get(plan.scale) or arm.start or arm.data
            if trained or plan.arms[arm.network].network is not None:
                raise UserError(
                    f"{here} arms.{name}.network = {arm.network!r}: expected an arm with a network of its own, and "
                    "beside it neither set, set_at, start nor data, since nothing is trained"
                )
    for claim in plan.compare:
        better, than = (plan.measured_on(name) for name in (claim.better, claim.than))
        if better != than:
            raise UserError(
                f"{here} compare: {claim.better} is measured on {better}, {claim.than} on {than}: expected two arms "
                "that are measured on the same images"
            )
    for name in plan.pretrain:
        plan.settings(Config, name, plan.study.seeds[0])
    for name, arm in plan.arms.items():
        if arm.network is None:
            plan.settings(FinetuneConfig, name, plan.study.seeds[0])
        load_config(FinetuneConfig, (), plan.held_out(name, plan.study.seeds[0]))


def _require(where: str, name: str | None, known: Mapping[str, object], table: str) -> None:
    if name is not None and name not in known:
        raise UserError(f"{where} {name!r}: expected a name in {table}: {', '.join(known)}")


def of_seed(keys: Sequence[str], seed: int) -> list[str]:
    """Keys with the seed in place of "{seed}"."""
    return [key.replace("{seed}", str(seed)) for key in keys]


A = TypeVar("A", bound=Arm)


def arms_at(scale: ScaleName, arms: Mapping[str, A]) -> dict[str, A]:
    """The arms that a study has at a scale."""
    return {name: arm for name, arm in arms.items() if arm.only in (None, scale)}

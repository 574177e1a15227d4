"""The configuration of a study; like every configuration, it imports neither torch nor DALI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bounds import Count, Number, Seed
from errors import UserError
from train.config.finetuning import FinetuneConfig
from train.config.load import load_config, read_toml
from train.config.pretraining import Config
from train.config.tables import as_toml

C = TypeVar("C", Config, FinetuneConfig)

MetricName = Literal["epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"]
ScaleName = Literal["small", "paper"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Render:
    """Hands that `make-data` renders, if their folder does not exist. The attributes are its options."""

    poses: Annotated[Count, Field(ge=10)]
    seed: Seed = 0
    scenes: Count = 40


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Dataset:
    """Images that arms name.

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
    """What the arms of one kind share.

    Attributes:
        config: TOML files, as `-c` takes them.
        set: keys, as for `--set`.
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
    by: Literal["finetune", "probe"] = "finetune"
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
        start: the pre-training arm whose encoder is taken; None: as configured.
        network: another arm, whose network is measured on this arm's data; nothing is trained.
        on: dataset to measure on; None: that of the training.
        published: the paper's figures.
    """

    start: str | None = None
    network: str | None = None
    on: str | None = None
    published: dict[MetricName, Number] = Field(default_factory=dict)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Claim:
    """The claim that one measured arm is better than another in a metric.

    Attributes:
        percent: the paper's improvement, in percent of the worse arm's value.
        claimed: whether the paper says so; False: the arms are only compared.
    """

    better: str
    than: str
    metric: MetricName = "pa_epe_cm"
    percent: Number | None = None
    claimed: bool = True


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Maps:
    """Maps of the equivariance error of two arms (paper, supplement, "Inspecting equivariance").

    Attributes:
        better: the arm that the paper says is better at every place of the maps.
        than: the other arm.
        rotations: angles in [-80, 80] degrees.
        translations: shifts in [-25, 25] pixels of 128, along each axis.
    """

    better: str
    than: str
    rotations: Annotated[Count, Field(ge=2)] = 17
    translations: Annotated[Count, Field(ge=2)] = 5


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
        seeds: seeds of order, augmentation and weights; all arms run once per seed.
        out: folder of the runs; None: runs/studies and the file's name. Studies with the same folder share the runs of
            arms with the same names.
        figures_of: checkpoint to measure: the "last", or the "best" on validation.
    """

    title: str
    source: str
    arms: dict[str, MeasuredArm]
    scales: dict[ScaleName, Scale]
    note: str | None = None
    pretrain: dict[str, Arm] = Field(default_factory=dict)
    compare: tuple[Claim, ...] = ()
    maps: Maps | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1, 2)
    out: Path | None = None
    figures_of: Literal["last", "best"] = "last"


class Plan:
    """A study at one scale: which arms run, with which settings, in which folders.

    Args:
        file: the study's file; its name without the ending names the study.
        study: what it holds.
        scale: the scale.
        only: the measured arms to run, besides those whose networks they measure; none: all of the study.

    Attributes:
        name: name of the study.
        pretrain: the pre-training arms that the measured ones start from.
        arms: the measured arms.
        compare: the claims about these arms.
        maps: the maps, if both of their arms are among these.

    Raises:
        UserError: the study has no such scale, or no such arm at this scale.
    """

    def __init__(self, file: Path, study: Study, scale: ScaleName, only: Sequence[str] = ()) -> None:
        if scale not in study.scales:
            raise UserError(f"{file}: has no scale {scale!r}; expected --scale {' or '.join(study.scales)}")
        self.file, self.study, self.scale, self.name = file, study, scale, file.stem
        self.at = study.scales[scale]
        self.out = (study.out or Path("runs/studies") / self.name) / scale
        self._all_arms = _at(scale, study.arms)
        for name in only:
            _require(f"{file}: at scale {scale}: --arm", name, self._all_arms, "arms")
        wanted = {*only, *(self._all_arms[name].network for name in only)} or self._all_arms.keys()
        self.arms = {name: arm for name, arm in self._all_arms.items() if name in wanted}
        starts = {arm.start for arm in self.arms.values()}
        self.pretrain = {name: arm for name, arm in _at(scale, study.pretrain).items() if name in starts}
        self.compare = tuple(claim for claim in study.compare if self._has_both(claim))
        self.maps = study.maps if study.maps is not None and self._has_both(study.maps) else None

    def folder(self, seed: int, kind: str, name: str) -> Path:
        """Folder of an arm's run of this kind: "pretrain", "finetune", "probe", and others."""
        return self.out / f"seed_{seed}" / f"{kind}_{name}"

    def run_of(self, name: str, seed: int) -> Path:
        """Folder of the network of a measured arm."""
        return self.folder(seed, self.at.by, self.arms[name].network or name)

    def measured_on(self, name: str) -> str:
        """Name of the dataset on which an arm is measured."""
        arm = self._all_arms[name]
        return arm.on or self._datasets(self._all_arms[arm.network] if arm.network else arm)[0]

    @property
    def first_arm(self) -> str:
        """The first measured arm of the study at this scale, whether it runs or not."""
        return next(iter(self._all_arms))

    def held_out(self, name: str) -> list[str]:
        """Overrides that choose the images on which an arm is measured."""
        dataset = self.at.data[self.measured_on(name)]
        return [f"data.root={as_toml(dataset.root)}", *dataset.set, *dataset.held_out]

    def used_data(self) -> dict[str, Dataset]:
        """The datasets that are trained or measured on, by name."""
        arms = [*self.pretrain.values(), *self.arms.values()]
        used = {name for arm in arms for name in self._datasets(arm)} | {self.measured_on(name) for name in self.arms}
        return {name: dataset for name, dataset in self.at.data.items() if name in used}

    def settings(self, kind: type[C], name: str, seed: int) -> tuple[C, list[str]]:
        """The configuration of a run, and the keys that it sets over the files of its kind. Errors as `load_config`."""
        pretraining = kind is Config
        arm: Arm = self.pretrain[name] if pretraining else self.arms[name]
        shared: Shared = self.at.pretrain if pretraining else self.at.measured
        overrides = self._data_keys(arm, shared.config, [*shared.set, *arm.set, *arm.set_at.get(self.scale, ())])
        folder = self.folder(seed, "pretrain" if pretraining else self.at.by, name)
        own: dict[str, str | int] = {"run.seed": seed, "run.out": str(folder)}
        if isinstance(arm, MeasuredArm) and arm.start is not None:
            own["encoder.weights"] = str(self.folder(seed, "pretrain", arm.start))
        overrides += [f"{key}={as_toml(value)}" for key, value in own.items()]
        try:
            return load_config(kind, shared.config, overrides), overrides
        except UserError as error:
            table = "pretrain" if pretraining else "arms"
            raise UserError(f"{self.file}: {table}.{name} at scale {self.scale}: {error}") from error

    def _has_both(self, compared: Claim | Maps) -> bool:
        return {compared.better, compared.than} <= self.arms.keys()

    def _datasets(self, arm: Arm) -> tuple[str, ...]:
        return arm.data or (next(iter(self.at.data)),)

    def _data_keys(self, arm: Arm, files: Sequence[Path], overrides: Sequence[str]) -> list[str]:
        """Overrides with those of the arm's datasets before them.

        With several datasets, all get the keys of `data`, those of the files included: the array of datasets replaces
        the files' table.
        """
        datasets = [self.at.data[name] for name in self._datasets(arm)]
        if len(datasets) == 1:
            return [f"data.root={as_toml(datasets[0].root)}", *datasets[0].set, *overrides]
        tables = ", ".join(f"{{root = {as_toml(dataset.root)}}}" for dataset in datasets)
        numbers = range(len(datasets))
        in_files = [f"data.{key}={as_toml(value)}" for file in files for key, value in _data_table(file).items()]
        before = [_numbered(key, number) for key in in_files for number in numbers]
        own = [_numbered(key, number) for number in numbers for key in datasets[number].set]
        # Later overrides win, so only the copies of one are dropped: a key that is not of `data` has no number.
        shared = [one for key in overrides for one in dict.fromkeys(_numbered(key, number) for number in numbers)]
        return [f"data=[{tables}]", *before, *own, *shared]


def load_study(file: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study's TOML file.

    Raises:
        UserError: the file cannot be read, an arm or dataset does not exist or cannot name a folder, an arm is compared
            with itself, a seed appears twice, or an arm's configuration is wrong at any scale.
    """
    study = load_config(Study, [file], overrides)
    if len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"{file}: seeds = {list(study.seeds)}: expected each seed once")
    for table, arms in (("pretrain", study.pretrain), ("arms", study.arms)):
        for name in arms:
            if not re.fullmatch(r"[\w-]+", name):
                raise UserError(f"{file}: {table}.{name!r} names a folder: expected letters, digits, - and _")
    claims: list[tuple[str, Claim | Maps]] = [("compare", claim) for claim in study.compare]
    if study.maps is not None:
        claims.append(("maps", study.maps))
    for key, claim in claims:
        for name in (claim.better, claim.than):
            _require(f"{file}: {key} names", name, study.arms, "arms")
        if claim.better == claim.than:
            raise UserError(f"{file}: {key}: {claim.better!r} is compared with itself: expected two arms")
    for scale in study.scales:
        _check(Plan(file, study, scale))
    return study


def _check(plan: Plan) -> None:
    here, data = f"{plan.file}: at scale {plan.scale}:", plan.at.data
    pretraining = _at(plan.scale, plan.study.pretrain)
    for name, arm in plan.arms.items():
        if arm.start is not None:
            _require(f"{here} arms.{name}.start =", arm.start, pretraining, "pretrain")
        if arm.network is not None:
            _require(f"{here} arms.{name}.network =", arm.network, plan.arms, "arms")
            if plan.arms[arm.network].network is not None:
                raise UserError(f"{here} arms.{name}.network = {arm.network!r} has no network of its own; name another")
            trained_with = {"set": arm.set, "set_at": arm.set_at.get(plan.scale), "start": arm.start, "data": arm.data}
            if ignored := [key for key, value in trained_with.items() if value]:
                raise UserError(
                    f"{here} arms.{name} has a network, and {ignored[0]}, which only training reads: remove one of them"
                )
        if arm.on is not None:
            _require(f"{here} arms.{name}.on =", arm.on, data, "data")
    for name, one in (*pretraining.items(), *plan.arms.items()):
        for dataset in one.data:
            _require(f"{here} {name}.data =", dataset, data, "data")
    for name, arm in plan.arms.items():
        if len(arm.data) > 1:
            raise UserError(
                f"{here} arms.{name}.data = {list(arm.data)}: expected one dataset; only pre-training mixes"
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
        load_config(FinetuneConfig, (), plan.held_out(name))


def _require(where: str, name: str, known: Mapping[str, object], table: str) -> None:
    if name not in known:
        raise UserError(f"{where} {name!r}: expected a name in {table}: {', '.join(known)}")


A = TypeVar("A", bound=Arm)


def _at(scale: ScaleName, arms: Mapping[str, A]) -> dict[str, A]:
    return {name: arm for name, arm in arms.items() if arm.only in (None, scale)}


def _data_table(file: Path) -> Mapping[str, object]:
    """The keys of `data` in a configuration file, without the root, which arms name."""
    table = read_toml(file).get("data", {})
    if not isinstance(table, Mapping):
        raise UserError(f"{file}: has several tables [[data]]; expected one, since the arms name their datasets")
    return {key: value for key, value in table.items() if key != "root"}


def _numbered(override: str, number: int) -> str:
    """The override of a key of `data`, for the dataset with this number; other overrides as they are."""
    return f"data.{number}.{override.removeprefix('data.')}" if override.startswith("data.") else override

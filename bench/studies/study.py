"""What a study is: the networks that it trains and measures, their runs, and the claims that it checks."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain

Keys = Sequence[str]
"""Keys of a configuration, as for `--set`."""

RUNS: Final = Path("runs/studies")


@dataclass(frozen=True)
class Dataset:
    """Images to train or measure on."""

    root: str
    keys: Keys = ()  # further ones of `data`
    held_out: Keys = ("data.part=evaluation", "data.split=all")  # choose the images to measure on
    render: Mapping[str, Any] | None = None  # options of `make_dataset`, for hands that are rendered at first use


@dataclass(frozen=True)
class Scale:
    """What all arms of a study share."""

    data: Dataset  # of arms that name no other
    pretrain: Keys = ()  # of pre-trainings, over the files
    measured: Keys = ()  # of fine-tunings, over the files
    pretrain_files: Sequence[str] = ()
    measured_files: Sequence[str] = ()
    processes: int = 1  # of a pre-training, in the commands that `--list` prints


# Scale small: rendered hands, minutes of one core. What differs from the paper, and why.
HANDS: Final = Dataset(
    ".data/studies/hands_3600_300",  # scenes shared by many poses do not name the image
    held_out=("data.split=val",),
    render={"poses": 3600, "seed": 3, "scenes": 300},
)
"""14,400 images. Held out: 1,440 images of 360 poses, which no network has seen."""

_SMALL: Final = (
    "geometry.side_px=48",  # a seventh of the pixels of 128
    "encoder.name=timm/test_resnet",  # timm's smallest ResNet: 0.5 million parameters
    "encoder.weights=random",  # ImageNet's know more than minutes of pre-training add
    "train.threads=1", "pipelines.threads=1",  # several seeds can run beside each other
    "run.log_every=50", "run.keep=1",
)  # fmt: skip

SMALL: Final = Scale(
    HANDS,
    pretrain=(
        *_SMALL, "run.checkpoint_every=200", "data.split=train", "probe.every_epochs=4",
        "data.center_frac=0.45",  # rendered hands are smaller in the picture than FreiHAND's
        "geometry.rotation_deg=[-180.0, 180.0]",  # rendered hands have every direction
        "geometry.scale=[0.8, 1.25]",  # at twice the size half of the hand is outside
        "appearance.colour_drop_probability=0.5",  # the colours of a scene tell images apart without the hand
        "loss.temperature=0.2",  # with 0.5 errors were larger in so few steps, which is not shown
        "optim.lr=2e-3", "optim.warmup_epochs=2.0",  # the paper's rule gives 1.6e-3 at this batch, for 100 epochs
        "train.epochs=20", "train.batch=256", "train.micro_batch=256",
    ),
    measured=(
        *_SMALL, "run.checkpoint_every=225", "validation.every_epochs=0",
        "data.box_margin=1.3",  # a tighter box than the default: more pixels of the hand
        "geometry.translation_frac=0.06", "geometry.scale=[0.85, 1.15]",  # boxes from joints are well centred
        "optim.lr=6e-3", "optim.warmup_epochs=0.5", "train.batch=32", "train.micro_batch=32",  # few steps
    ),
)  # fmt: skip
"""A pre-training takes 1,000 steps of 256 images: 6 minutes of a core with instructions for bf16."""

# Scale paper.
FREIHAND: Final = Dataset("data/freihand")
FREIHAND_VAL: Final = Dataset("data/freihand", held_out=("data.split=val",))
"""The paper's "own training and validation split (90% as training and 10% as validation set)"."""
YOUTUBE_3D_HANDS: Final = Dataset(
    "data/youtube3d", ("data.source=youtube3d",), (*Dataset.held_out, "data.regressor=data/mano_regressor.npy")
)
TWO_SOURCES: Final = (FREIHAND, YOUTUBE_3D_HANDS)

FROZEN: Final = {  # the paper's two-layer MLP on a frozen encoder
    "small": replace(
        SMALL, measured=(*SMALL.measured, "pose.head=mlp", "train.frozen=true", "optim.lr=1e-3", "train.epochs=5")
    ),
    "paper": Scale(
        FREIHAND_VAL,
        pretrain=("data.split=train",),
        pretrain_files=("configs/peclr_rn50.toml",),
        measured_files=("configs/finetune_rn50.toml", "configs/finetune_frozen.toml"),
        processes=8,
    ),
}
ALL_LABELS: Final = Scale(
    FREIHAND,
    # The baseline starts from ImageNet, as the authors' pre-training does.
    measured=("data.split=all", "validation.every_epochs=0", "encoder.weights=imagenet"),
    pretrain_files=("configs/peclr_rn152.toml",),
    measured_files=("configs/finetune_rn152.toml",),
    processes=8,
)


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
    network: str | None = None  # another measured arm, whose network is measured on `on`; nothing is trained
    on: Dataset | None = None  # to measure on, if not the dataset of the training

    @classmethod
    def by_labels(cls, starts: Collection[str], labels: Mapping[str, Keys]) -> dict[str, Arm]:
        """Arms "START_SHARE": fine-tuning with each share of the labels, from "scratch" and from each pre-training."""
        return {
            f"{start}_{share}": cls(keys, start=start if start in starts else None)
            for share, keys in labels.items()
            for start in ("scratch", *starts)
        }


class Claim(NamedTuple):
    """The claim that one measured arm is better than another."""

    better: str
    than: str
    metric: str = "epe_px"
    percent: float | None = None  # the paper's: of the worse arm's error, or of the better arm's AUC


class Run(NamedTuple):
    """A run of one seed: its command, the files and keys of its configuration, and its folder."""

    command: Literal["pretrain", "finetune"]
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
        train: Any = pretrain if self.command == "pretrain" else finetune
        train(self.config, "auto")

    def shell_command(self, processes: int) -> str:
        """A command that does the same; with several processes, if it is a pre-training whose batch allows it."""
        launcher, train = ["python"], self.config.train
        if self.command == "pretrain" and (most := min(processes, train.batch // train.micro_batch)) > 1:
            launcher = ["torchrun", "--standalone", f"--nproc-per-node={most}"]
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
        """The fine-tuning that makes the network of a measured arm."""
        trained = self.measured[name].network or name
        arm = self.measured[trained]
        out = self.folder / f"seed_{seed}" / f"finetune_{trained}"
        keys = self._keys(arm, self.at.measured, seed, out)
        keys += [] if arm.start is None else [f"encoder.weights={self.pretraining(arm.start, seed).out}"]
        return Run("finetune", self.at.measured_files, keys, out)

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

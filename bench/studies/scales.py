"""The datasets and settings of the small scale and of the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Keys = Sequence[str]
"""Keys of a configuration, as for `--set`."""

RUNS: Final = Path("runs/studies")


@dataclass(frozen=True)
class Dataset:
    """Images to train or measure on."""

    root: str
    keys: Keys = ()  # further ones of `data`
    held_out: Keys = ("data.part=evaluation", "data.split=all")  # choose the images to measure on
    render: Mapping[str, int] | None = None  # options of `make_dataset`, for hands that are rendered at first use


@dataclass(frozen=True)
class Scale:
    """What all arms of a study share."""

    data: Dataset  # of arms that name no other
    pretrain: Keys = ()  # of pre-trainings, over the files
    measured: Keys = ()  # of fine-tunings and read-outs, over the files
    pretrain_files: Sequence[str] = ()
    measured_files: Sequence[str] = ()
    processes: int = 1  # of a pre-training, in the commands that `--list` prints


def hands(poses: int, seed: int, scenes: int, held_out: Keys = Dataset.held_out) -> Dataset:
    """Rendered hands, each pose before one of so many scenes."""
    render = {"poses": poses, "seed": seed, "scenes": scenes}
    return Dataset(f".data/studies/hands_{poses}_{scenes}", held_out=held_out, render=render)


# Scale small: rendered hands, minutes of one core. What differs from the paper, and why.
HANDS_3500: Final = hands(3500, 2, 4)
HANDS_3600: Final = hands(3600, 3, 300, ("data.split=val",))  # scenes shared by many poses do not name the image
"""14,400 images. Held out: 1,440 images of 360 poses, which no network has seen."""

_THREADS: Final = ("train.threads=1", "pipelines.threads=1")  # several seeds can run beside each other
_FROM_RANDOM: Final = ("geometry.side_px=48", "encoder.name=resnet18", "encoder.weights=random", *_THREADS)
"""Views with a seventh of the pixels of 128. ImageNet's weights know more than minutes of pre-training add."""

SMALL_PRETRAIN: Final = (
    *_FROM_RANDOM, "run.log_every=50", "run.checkpoint_every=200", "run.keep=1", "data.split=train",
    "data.center_frac=0.45",  # rendered hands are smaller in the picture than FreiHAND's
    "geometry.rotation_deg=[-180.0, 180.0]",  # rendered hands have every direction
    "geometry.scale=[0.8, 1.25]",  # at twice the size half of the hand is outside
    "appearance.colour_drop_probability=0.5",  # the colours of a scene tell images apart without the hand
    "loss.temperature=0.2",  # with 0.5 errors were larger in so few steps, which is not shown
    "optim.lr=2e-3", "optim.warmup_epochs=0.5",  # the paper's rule gives 1.1e-3 at this batch, for 100 epochs
    "train.epochs=4", "train.batch=128", "train.micro_batch=128",  # 98 steps an epoch; with 2048 there were 6
)  # fmt: skip

LONGER_PRETRAIN: Final = (
    *SMALL_PRETRAIN, "encoder.name=timm/test_resnet",  # timm's smallest ResNet: 0.5 million parameters
    "optim.warmup_epochs=2.0", "train.epochs=20", "train.batch=256", "train.micro_batch=256", "probe.every_epochs=4",
)  # fmt: skip
"""1,000 steps of 256 images with a smaller encoder: 6 minutes of a core with instructions for bf16."""

SMALL_FINETUNE: Final = (
    *_FROM_RANDOM, "run.log_every=50", "run.checkpoint_every=225", "run.keep=1",
    "data.box_margin=1.3",  # a tighter box than the default: more pixels of the hand
    "geometry.translation_frac=0.06", "geometry.scale=[0.85, 1.15]",  # boxes from joints are well centred
    "optim.lr=1e-3", "optim.warmup_epochs=0.5", "train.batch=32", "train.micro_batch=32",  # few steps
    "validation.every_epochs=0",
)  # fmt: skip

SMALL_FROZEN: Final = (*SMALL_FINETUNE, "pose.head=mlp", "train.epochs=5", "train.frozen=true")
"""The paper's two-layer MLP on a frozen encoder."""

SMALL_READ_OUT: Final = (*_FROM_RANDOM, "data.box=center", "data.center_frac=0.45")
"""For `by="probe"`: a linear head, fitted in one pass to the views of pre-training, in place of the paper's MLP."""

# Scale paper.
FREIHAND: Final = Dataset("data/freihand")
FREIHAND_VAL: Final = Dataset("data/freihand", held_out=("data.split=val",))
"""The paper's "own training and validation split (90% as training and 10% as validation set)"."""
YOUTUBE_3D_HANDS: Final = Dataset(
    "data/youtube3d", ("data.source=youtube3d",), (*Dataset.held_out, "data.regressor=data/mano_regressor.npy")
)

SHORT: Final = Scale(HANDS_3500, SMALL_PRETRAIN, SMALL_READ_OUT)
FROZEN: Final = {
    "small": Scale(HANDS_3600, LONGER_PRETRAIN, (*SMALL_FROZEN, "encoder.name=timm/test_resnet")),
    "paper": Scale(
        FREIHAND_VAL,
        pretrain=("data.split=train",),
        pretrain_files=("configs/peclr_rn50.toml",),
        measured_files=("configs/finetune_rn50.toml", "configs/finetune_frozen.toml"),
        processes=8,
    ),
}
ALL_LABELS: Final = {
    # views half as large again as in pre-training, as 224 is to 128
    "small": Scale(HANDS_3500, SMALL_PRETRAIN, (*SMALL_FINETUNE, "geometry.side_px=72", "train.epochs=4")),
    "paper": Scale(
        FREIHAND,
        # The baseline starts from ImageNet, as the authors' pre-training does.
        measured=("data.split=all", "validation.every_epochs=0", "encoder.weights=imagenet"),
        pretrain_files=("configs/peclr_rn152.toml",),
        measured_files=("configs/finetune_rn152.toml",),
        processes=8,
    ),
}

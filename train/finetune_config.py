"""The configuration of fine-tuning: pre-training's tables where they mean the same, with the paper's other defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag
from pydantic.dataclasses import dataclass

from models.encoders import EncoderConfig
from models.pose import PoseConfig
from pipelines.draws import ColourConfig, GeometryConfig, Range
from pipelines.loader import PipelinesConfig
from pipelines.sources import DataConfig
from train.config import RunConfig
from train.pose.step import PoseLossConfig


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneRunConfig(RunConfig):
    """Where a run lives and what it writes, as in pre-training.

    Attributes:
        out: the run folder.
    """

    out: str = "runs/finetune"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneDataConfig(DataConfig):
    """Which labelled images, and which square of each is the canonical view; attributes as `DataConfig`.

    The boxes come from the joints, since these are known here, as in the authors' code.
    """

    split: Literal["all", "train", "val"] = "train"
    box: str = "joints"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneGeometryConfig(GeometryConfig):
    """Random affine map of a view, attributes as `GeometryConfig` (paper, supplement, "Supervised fine-tuning")."""

    rotation_deg: Range = (-90.0, 90.0)
    translation_frac: Annotated[float, Field(ge=0, le=1)] = 20 / 128
    scale: Range = (0.7, 1.3)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneColourConfig(ColourConfig):
    """Colour jitter, attributes as `ColourConfig`: none, since the paper names none for fine-tuning."""

    jitter: Literal["hsv", "linear", "none"] = "none"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneOptimConfig:
    """Adam and its learning rate, which falls along a cosine to zero (paper, supplement, "Supervised fine-tuning").

    Attributes:
        lr: learning rate at the start, or at the end of the warm-up.
        weight_decay: of all parameters, added to the gradient.
        warmup_epochs: length of a linear warm-up.
    """

    lr: PositiveFloat = 5e-4
    weight_decay: NonNegativeFloat = 0.0
    warmup_epochs: NonNegativeFloat = 0.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneTrainConfig:
    """How fine-tuning steps; what is not described here is as in pre-training (`train.config.TrainConfig`).

    Attributes:
        epochs: passes over the data.
        batch: images in one optimiser step, over all ranks.
        micro_batch: images that pass batch norm together. It belongs to the method; N ranks need N of them in a batch.
        frozen: leave the encoder as it is, running statistics included, and train the head alone; the paper then takes
            `pose.head = "mlp"`.
        precision: as in pre-training.
        device: "auto" takes a GPU if there is one.
        compile: torch.compile the network.
        channels_last: keep the network's tensors channels-last.
        threads: CPU threads of torch; None leaves torch's choice, and each of several processes its share of the cores.
    """

    epochs: Annotated[int, Field(ge=1)] = 100
    batch: Annotated[int, Field(ge=2)] = 128
    micro_batch: Annotated[int, Field(ge=2)] = 128
    frozen: bool = False
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    channels_last: bool = True
    threads: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ValidationConfig:
    """Metrics on the source's validation split, and the best checkpoint by PA-EPE.

    Attributes:
        every_epochs: epochs between two validations; the last step always validates. 0 never does.
        batch: images in one step of validation, over all ranks.
    """

    every_epochs: NonNegativeFloat = 1.0
    batch: Annotated[int, Field(ge=1)] = 128


FinetuneData = Annotated[
    Annotated[FinetuneDataConfig, Tag("[data]")]
    | Annotated[tuple[FinetuneDataConfig, ...], Field(min_length=1, max_length=256), Tag("[[data]]")],
    Discriminator(lambda value: "[[data]]" if isinstance(value, Sequence) else "[data]"),
]
"""One source as a table, or several as an array of tables."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneConfig:
    """All of a fine-tuning run, one attribute per table of the TOML file; `data` may be an array of tables."""

    run: FinetuneRunConfig = FinetuneRunConfig()
    data: FinetuneData = FinetuneDataConfig()
    geometry: FinetuneGeometryConfig = FinetuneGeometryConfig()
    colour: FinetuneColourConfig = FinetuneColourConfig()
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    pose: PoseConfig = PoseConfig()
    loss: PoseLossConfig = PoseLossConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    validation: ValidationConfig = ValidationConfig()

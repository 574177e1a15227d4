"""The configuration of fine-tuning: pre-training's tables where they mean the same, with the paper's other defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bounds import Count, Epochs, Factor, Fraction, NotNegative, Positive
from models.config import EncoderConfig, PoseConfig
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig, Range
from train.config.pretraining import OneOrMore, RunConfig, StepsConfig


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneRunConfig(RunConfig):
    """Where a run lives and what it writes, attributes as `RunConfig`."""

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
    translation_frac: Fraction = 20 / 128
    scale: tuple[Factor, Factor] = (0.7, 1.3)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneColourConfig(ColourConfig):
    """Colour jitter, attributes as `ColourConfig`: none, since the paper names none for fine-tuning."""

    jitter: Literal["hsv", "linear", "none"] = "none"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PoseLossConfig:
    """Weights of the losses, each a mean over samples, keypoints and coordinates. The paper gives none.

    Attributes:
        keypoints: of |J2D - target|, in pixels of the view.
        depth: of |d - target|, root-relative and scale-normalised.
        root_depth: of the refined root depth's |d_root - target|, scale-normalised; only where the network refines.
    """

    keypoints: NotNegative = 1.0
    depth: NotNegative = 1.0
    root_depth: NotNegative = 1.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneOptimConfig:
    """Adam and its learning rate, which falls along a cosine to zero (paper, supplement, "Supervised fine-tuning").

    Attributes:
        lr: learning rate at the start, or at the end of the warm-up.
        weight_decay: of all parameters, added to the gradient.
        warmup_epochs: length of a linear warm-up.
    """

    lr: Positive = 5e-4
    weight_decay: NotNegative = 0.0
    warmup_epochs: Epochs = 0.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneTrainConfig(StepsConfig):
    """How fine-tuning steps; the other attributes as `StepsConfig`.

    Attributes:
        frozen: leave the encoder as it is, running statistics included, and train the head alone; the paper then takes
            `pose.head = "mlp"`.
    """

    batch: Annotated[Count, Field(ge=2)] = 128
    micro_batch: Annotated[Count, Field(ge=2)] = 128
    frozen: bool = False


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ValidationConfig:
    """Metrics on the source's validation split, and the best checkpoint by PA-EPE.

    Attributes:
        every_epochs: epochs between two validations; the last step always validates. 0 never does.
        batch: images in one step of validation, over all ranks.
    """

    every_epochs: Epochs = 1.0
    batch: Count = 128


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FinetuneConfig:
    """All of a fine-tuning run, one attribute per table of the TOML file; `data` may be an array of tables."""

    run: FinetuneRunConfig = FinetuneRunConfig()
    data: OneOrMore[FinetuneDataConfig] = FinetuneDataConfig()
    geometry: FinetuneGeometryConfig = FinetuneGeometryConfig()
    colour: FinetuneColourConfig = FinetuneColourConfig()
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    pose: PoseConfig = PoseConfig()
    loss: PoseLossConfig = PoseLossConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def augmentation(self) -> Augmentation:
        """How views are made at random."""
        return Augmentation(self.geometry, self.colour)

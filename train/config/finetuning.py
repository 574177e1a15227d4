"""Configuration of fine-tuning: the tables of pre-training with other defaults, and further tables."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Count, Epochs, Fraction, NotNegative, Positive
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from peclr_dali.train.config.pretraining import OneOrMore, RunConfig, StepsConfig


@dataclass(frozen=True, config=STRICT)
class FinetuneDataConfig(DataConfig):
    """The labelled images, and the square of each that becomes the canonical view. Attributes as in `DataConfig`.

    By default the boxes come from the joints, as in the authors' code.
    """

    split: Literal["all", "train", "val"] = "train"
    box: str = "joints"

    @field_validator("positive")
    @classmethod
    def _of_one_image(cls, value: str) -> str:
        if value != "self":
            raise ValueError("a pose is learnt from single views; pairs of images are for pre-training")
        return value


@dataclass(frozen=True, config=STRICT)
class PoseLossConfig:
    """Weights of the losses, each a mean over samples, keypoints and coordinates.

    The paper gives no weights and no units. With weights of 1, the PA-EPE on rendered hands was a quarter larger
    (docs/results.md, "Loss weights and schedule"). In sides of the view, the same weights hold for views of every size.

    Attributes:
        keypoints: weight of |J2D - target|, in sides of the view: 1 is the view's width.
        depth: weight of |d - target|, root-relative and scale-normalised.
        root_depth: weight of |d_root - target| of the refined root depth, scale-normalised; used if `pose.refine` is
            true.
    """

    keypoints: NotNegative = 64.0
    depth: NotNegative = 20.0
    root_depth: NotNegative = 0.1


@dataclass(frozen=True, config=STRICT)
class FinetuneOptimConfig:
    """Adam, with a cosine schedule of the learning rate to zero (paper, supplement, "Supervised fine-tuning").

    Attributes:
        lr: learning rate at the start, or at the end of the warm-up.
        weight_decay: weight decay of all parameters, added to the gradient.
        warmup_epochs: length of a linear warm-up.
    """

    lr: Positive = 5e-4
    weight_decay: NotNegative = 0.0
    warmup_epochs: Epochs = 0.0


@dataclass(frozen=True, config=STRICT)
class FinetuneTrainConfig(StepsConfig):
    """Settings of fine-tuning's steps. The other attributes as in `StepsConfig`.

    Attributes:
        frozen: do not train the encoder, nor update its running statistics; only the head is trained. The paper then
            uses `pose.head = "mlp"`.
        batch_norm: statistics that batch norm uses in training: those of the starting weights ("fixed"), or of each
            micro-batch ("batch"). "auto" is "fixed" if `encoder.weights` is a fine-tuned network whose head is kept
            and there are fewer than 1,000 labelled hands, else "batch": few hands would give other running statistics,
            and with these some poses are far off.
    """

    batch: Annotated[Count, Field(ge=2)] = 128
    micro_batch: Annotated[Count, Field(ge=2)] = 128
    frozen: bool = False
    batch_norm: Literal["auto", "fixed", "batch"] = "auto"


@dataclass(frozen=True, config=STRICT)
class ValidationConfig:
    """Validation on the source's validation split, and the best checkpoint by PA-EPE.

    Attributes:
        every_epochs: epochs between two validations. The last step always validates. 0: never validate.
        batch: images in one step of validation, over all ranks.
        start_share: what is validated, and kept as best, is this share of the starting weights and the rest of the
            present ones, if `encoder.weights` is a fine-tuned network whose head is kept. Half of each changes few of
            the poses that the network knows (Wortsman et al. 2022, arXiv 2109.01903).
    """

    every_epochs: Epochs = 1.0
    batch: Count = 128
    start_share: Fraction = 0.0


@dataclass(frozen=True, config=STRICT)
class FinetuneConfig:
    """All of a fine-tuning run, one attribute per table of the TOML file; in `data` one or several.

    The ranges of the geometry are the paper's (supplement, "Supervised fine-tuning"), which has no colour jitter there.
    `load_config` gives keys that a table leaves out the defaults of this class, not those of the table's own class.
    """

    run: RunConfig = RunConfig(out="runs/finetune")
    data: Annotated[tuple[FinetuneDataConfig, ...], OneOrMore, Field(min_length=1)] = (FinetuneDataConfig(),)
    geometry: GeometryConfig = GeometryConfig(rotation_deg=(-90.0, 90.0), translation_frac=20 / 128, scale=(0.7, 1.3))
    colour: ColourConfig = ColourConfig(jitter="none")
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    pose: PoseConfig = PoseConfig()
    loss: PoseLossConfig = PoseLossConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    validation: ValidationConfig = ValidationConfig()

    @field_validator("geometry")
    @classmethod
    def _not_flipped(cls, value: GeometryConfig) -> GeometryConfig:
        if value.flip_probability > 0:  # labels are not exchanged, left for right, as those of a mirrored sample are
            raise ValueError("flip_probability > 0, and a pose is learnt from views that are not flipped")
        return value

    @property
    def augmentation(self) -> Augmentation:
        """The tables of the augmentations."""
        return Augmentation(self.geometry, self.colour)

"""The configuration of pre-training, composed from the components' own tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from bounds import Count, Epochs, NotNegative, Positive, Seed, Threads, Timeout
from errors import UserError
from models.config import EncoderConfig, EquivarianceConfig, ProjectorConfig
from models.losses import AnyLoss
from models.losses.nt_xent import NTXent
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig

D = TypeVar("D", bound=DataConfig)

OneOrMore = Annotated[
    Annotated[D, Tag("[data]")] | Annotated[tuple[D, ...], Field(min_length=1, max_length=256), Tag("[[data]]")],
    Discriminator(lambda value: "[[data]]" if isinstance(value, Sequence) else "[data]"),
]
"""One source as a table, or several as an array of tables."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RunConfig:
    """Where a run lives and what it writes.

    Attributes:
        out: the run folder.
        seed: of the order, the augmentations and the weights.
        log_every: optimiser steps between two rows of metrics.
        checkpoint_every: optimiser steps between two checkpoints; the last step always writes one.
        keep: checkpoints that stay.
        log_samples: write which samples every step saw, for audits.
        rank_timeout_s: seconds after which a rank that does not come, or does not get on, is named and the run ends.
    """

    out: str = "runs/pretrain"
    seed: Seed = 0
    log_every: Count = 10
    checkpoint_every: Count = 200
    keep: Count = 3
    log_samples: bool = False
    rank_timeout_s: Timeout = 600.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StepsConfig:
    """How pre-training and fine-tuning step.

    Attributes:
        epochs: passes over the data.
        batch: images in one optimiser step, over all ranks.
        micro_batch: images that pass batch norm together, 128 in the authors' code. It belongs to the method: neither
            memory nor the number of ranks changes it, and N ranks need N of them in a batch.
        precision: "fp32", "bf16" or "fp16" (with loss scaling) under autocast, "fp64" for exact comparisons; "auto" is
            bf16 on GPUs that have it, fp16 on others, fp32 on CPUs.
        device: "auto" takes a GPU if there is one.
        compile: torch.compile the network.
        channels_last: keep the network's tensors channels-last.
        threads: CPU threads of torch; unset, torch's choice, and for each of several processes its share of the cores.
    """

    epochs: Count = 100
    batch: Annotated[Count, Field(ge=2)] = 2048
    micro_batch: Count = 128
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    channels_last: bool = True
    threads: Threads | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig(StepsConfig):
    """How pre-training steps (paper, supplement, "Self-supervised pre-training"); each image gives two views.

    The other attributes as `StepsConfig`.

    Attributes:
        sync_batch_norm: batch norm over the micro-batches of all ranks that are at the same place in their shares
            (GPUs only). The number of ranks then belongs to the method, too.
        recompute: "never" keeps all graphs, "always" embeds first and recomputes with graph, "auto" looks at the
            memory. The gradient is the same.
    """

    sync_batch_norm: bool = False
    recompute: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OptimConfig:
    """The optimiser; the defaults are the paper's (supplement, "Training details"), else the authors' code's.

    Attributes:
        lr: learning rate at the end of the warm-up; unset, it is lr_per_sqrt_image * sqrt(images per step).
        lr_per_sqrt_image: see `lr`.
        weight_decay: of all parameters that `decay_exempt` does not exempt.
        trust_coefficient: c of LARS.
        clip: whether LARS only ever lowers the learning rate of a tensor.
        eps: added to the denominator of LARS.
        backend: the inner Adam: "torch" (fused), "apex" (NVIDIA apex's FusedAdam), or "auto": apex if it is
            installed and the parameters are on a GPU.
        decay_exempt: what has no weight decay: "paper", all biases and norm parameters, or "upstream", what
            the authors' search for "bias" or "bn" in names finds: there the norm weights of stem, downsampling and
            projector decay.
        warmup_epochs: length of the linear warm-up.
    """

    lr: Positive | None = None
    lr_per_sqrt_image: Positive = 1e-4
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 0.02
    clip: bool = True
    eps: NotNegative = 1e-8
    backend: Literal["auto", "torch", "apex"] = "auto"
    decay_exempt: Literal["paper", "upstream"] = "paper"
    warmup_epochs: Epochs = 10.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ProbeConfig:
    """Shows whether the encoder learns: ridge regression from its frozen features to keypoints, where these are known.

    Attributes:
        every_epochs: epochs between two probes; the first and the last step probe as well. 0 never does.
        images: labelled images to use, three quarters to fit and one to measure. They are at most a sixteenth of the
            images that are trained on between two probes, so that probing takes less than 2 % of the time.
        ridge: weight of the squared coefficients of standardised features, scikit-learn's `alpha`.
    """

    every_epochs: Epochs = 0.0
    images: Count = 2048
    ridge: Positive = 100.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """All of a pre-training run, one attribute per table of the TOML file; `data` may be an array of tables."""

    run: RunConfig = RunConfig()
    data: OneOrMore[DataConfig] = DataConfig()
    geometry: GeometryConfig = GeometryConfig()
    colour: ColourConfig = ColourConfig()
    appearance: AppearanceConfig = AppearanceConfig()
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    projector: ProjectorConfig = ProjectorConfig()
    equivariance: EquivarianceConfig = EquivarianceConfig()
    loss: AnyLoss = NTXent()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    probe: ProbeConfig = ProbeConfig()

    @property
    def augmentation(self) -> Augmentation:
        """How views are made at random."""
        return Augmentation(self.geometry, self.colour, self.appearance)


def require_whole_micro_batches(batch: int, micro_batch: int) -> None:
    """A batch that is not made of whole micro-batches is a `UserError`."""
    if batch % micro_batch:
        raise UserError(
            f"train.batch = {batch} is not a multiple of train.micro_batch = {micro_batch}: batch norm sees whole "
            "micro-batches, so change one of the two."
        )

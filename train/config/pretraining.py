"""Configuration of pre-training, composed from the tables of its components."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Count, Epochs, NotNegative, Positive, Seed, Threads, Timeout
from peclr_dali.models.config import EncoderConfig, EquivarianceConfig, LossConfig, ProjectorConfig
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig

OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
"""Takes one table, [data], as an array of one."""


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """The run's folder and what is written there.

    Attributes:
        out: the run's folder.
        seed: seed of the order, the augmentations and the weights.
        log_every: optimiser steps between two rows of metrics.
        checkpoint_every: optimiser steps between two checkpoints; the last step always writes one.
        keep: number of checkpoints to keep.
        log_samples: write the samples of every step to a file, for audits.
        rank_timeout_s: the run ends if a rank keeps the others waiting for this number of seconds.
        tensorboard: also write the figures for TensorBoard.
    """

    out: str = "runs/pretrain"
    seed: Seed = 0
    log_every: Count = 10
    checkpoint_every: Count = 200
    keep: Count = 3
    log_samples: bool = False
    rank_timeout_s: Timeout = 600.0
    tensorboard: bool = True


@dataclass(frozen=True, config=STRICT)
class StepsConfig:
    """Settings of the steps, for pre-training and fine-tuning.

    Attributes:
        epochs: passes over the data.
        batch: images in one optimiser step, over all ranks.
        micro_batch: images that pass batch norm together, 128 in the authors' code. It changes the result, so it is
            never adapted to memory or to the number of ranks. N ranks need at least N micro-batches in a batch.
        precision: "fp32"; "bf16" or "fp16" (with loss scaling) under autocast; "fp64" for exact comparisons; "auto" is
            bf16 on GPUs and CPUs with instructions for it, fp16 on other GPUs, fp32 on other CPUs and for views of
            less than 32 pixels on a CPU. On GPUs since Ampere, torch computes fp32's convolutions in TF32 (10 bits of
            mantissa) by default. Trained networks (predict, evaluate, validation) run in fp32 without TF32, unless
            another precision than "auto" is set.
        device: "auto" uses a GPU if there is one.
        compile: torch.compile the network: fewer and larger kernels, after a longer start.
        channels_last: keep the network's tensors channels-last.
        threads: CPU threads of torch, at most one per core. Unset: torch's choice for one process, else the process's
            share of the cores.
    """

    epochs: Count = 100
    batch: Annotated[Count, Field(ge=2)] = 2048
    micro_batch: Count = 128
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    channels_last: bool = True
    threads: Threads | None = None


@dataclass(frozen=True, config=STRICT)
class TrainConfig(StepsConfig):
    """Settings of pre-training's steps (paper, supplement, "Self-supervised pre-training").

    The other attributes as in `StepsConfig`.

    Attributes:
        recompute: "never" keeps the graphs of all micro-batches. "always" drops each graph and builds it again. "auto"
            keeps as many as fit into free memory. The gradient is the same.
        cuda_graph: in the third step, record the gradient's kernels as one CUDA graph, and replay it from then on: the
            host then starts one graph in a step, not thousands of kernels. On several ranks there is one graph between
            every two exchanges. It has no effect on a CPU.
    """

    recompute: Literal["auto", "always", "never"] = "auto"
    cuda_graph: bool = False


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """The optimiser. Defaults are from the paper (supplement, "Training details"), else from the authors' code.

    Attributes:
        lr: learning rate at the end of the warm-up. If unset: lr_per_sqrt_image * sqrt(images per step).
        lr_per_sqrt_image: see `lr`.
        weight_decay: weight decay of all parameters that are not exempt by `decay_exempt`.
        trust_coefficient: the factor c of LARS.
        clip: let LARS lower the learning rate of a tensor, but not raise it.
        eps: added to the denominator of LARS.
        lars: tensors that LARS scales: "all"; "weights": no biases and no norm parameters; or "none": AdamW alone, as
            transformers want it.
        backend: the inner Adam: torch's, fused, or "apex": NVIDIA apex's FusedAdam, if it is installed.
        decay_exempt: parameters without weight decay. "paper": all biases and norm parameters. "upstream": parameters
            with "bias" or "bn" in their names in the authors' code; the norm weights of stem, downsampling and
            projector then decay.
        warmup_epochs: length of the linear warm-up.
    """

    lr: Positive | None = None
    lr_per_sqrt_image: Positive = 1e-4
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 0.02
    clip: bool = True
    eps: NotNegative = 1e-8
    lars: Literal["all", "weights", "none"] = "all"
    backend: Literal["torch", "apex"] = "torch"
    decay_exempt: Literal["paper", "upstream"] = "paper"
    warmup_epochs: Epochs = 10.0


@dataclass(frozen=True, config=STRICT)
class ProbeConfig:
    """A probe of the encoder during training: ridge regression from its frozen features to known keypoints.

    Attributes:
        every_epochs: epochs between two probes; the first and the last step are also probed. 0: no probes.
        images: labelled images to use, three quarters to fit on and one quarter to measure on. They are at most a
            sixteenth of the images that are trained on between two probes, so that probing takes less than 2 % of the
            time.
    """

    every_epochs: Epochs = 0.0
    images: Count = 2048


@dataclass(frozen=True, config=STRICT)
class Config:
    """All of a pre-training run, one attribute per table of the TOML file; in `data` one or several."""

    run: RunConfig = RunConfig()
    data: Annotated[tuple[DataConfig, ...], OneOrMore, Field(min_length=1)] = (DataConfig(),)
    geometry: GeometryConfig = GeometryConfig()
    colour: ColourConfig = ColourConfig()
    appearance: AppearanceConfig = AppearanceConfig()
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    projector: ProjectorConfig = ProjectorConfig()
    equivariance: EquivarianceConfig = EquivarianceConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    probe: ProbeConfig = ProbeConfig()

    @property
    def augmentation(self) -> Augmentation:
        """The tables of the augmentations."""
        return Augmentation(self.geometry, self.colour, self.appearance)

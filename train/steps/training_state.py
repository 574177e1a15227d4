"""The training state that checkpoints hold, and the optimiser step."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from peclr_dali.models.config import EncoderConfig
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.steps.optim import learning_rate_factor
from peclr_dali.train.steps.stopwatch import Stopwatch

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
"""Precision -> type of the parameters, and type of autocast (None: no autocast)."""


class Result(Protocol):
    """Result of a step, for the training loop."""

    @property
    def loss(self) -> Tensor:
        """Scalar, of the global batch, on the device."""


N = TypeVar("N", bound=nn.Module)
R = TypeVar("R", bound=Result)
M = TypeVar("M", bound=Callable[..., Any])


class TrainingState(ABC, Generic[N, R]):
    """A network in training: everything that a checkpoint holds, and the optimiser step.

    Args:
        fresh: False if a checkpoint will be restored, so that no starting weights need to be read.

    Attributes:
        total_steps: optimiser steps of the whole run.
        steps_done: optimiser steps so far.
        own_work: times this rank's own work in a step, without waiting for other ranks.

    Raises:
        UserError: the starting weights cannot be used.
    """

    own_work: Stopwatch

    def __init__(self, config: Config | FinetuneConfig, world: World, steps_per_epoch: int, *, fresh: bool) -> None:
        self.world, train = world, config.train
        self.precision = resolve_precision(config, world.device)
        self.dtype, self.autocast_dtype = PRECISIONS[self.precision]
        self.total_steps = train.epochs * steps_per_epoch
        encoder = config.encoder if fresh else dataclasses.replace(config.encoder, weights="random")
        self.network = self.build_network(encoder).to(world.device, self.dtype)
        layout = torch.channels_last if train.channels_last else torch.contiguous_format
        for parameter in self.network.parameters():
            if parameter.ndim == 4:  # some models of timm have kernels of rank 5, which have no such layout
                parameter.data = parameter.data.contiguous(memory_format=layout)
        self.optimizer = self.build_optimizer()
        warmup_steps = round(config.optim.warmup_epochs * steps_per_epoch)
        total_steps = self.total_steps  # not self: a cycle would keep the network in memory after the run
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, total_steps, warmup_steps))
        self.scaler = GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.steps_done = 0

    @abstractmethod
    def build_network(self, encoder: EncoderConfig) -> N:
        """The network of the configuration, with this encoder's weights."""

    @abstractmethod
    def build_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimiser of the network's parameters."""

    @abstractmethod
    def gradient(self, batch: Batch) -> R:
        """Write the gradient of a global batch to `.grad`, scaled by the scaler. `batch` is this rank's share."""

    def casts_once(self) -> torch.autocast:
        """In the `with` block, autocast casts each weight once, for all micro-batches; do not change weights in it.

        Autocast itself is not switched on. It forgets its casts where its outermost block ends, and this is one. In a
        compiled network it has no effect: there the casts are part of the graph, and run in each micro-batch.
        """
        return torch.autocast(self.world.device.type, enabled=False)

    @abstractmethod
    def figures(self, result: R) -> dict[str, float]:
        """The figures in a row of metrics besides the loss. Waits for the device; called on rank 0 only."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def step(self, batch: Batch) -> R:
        """One optimiser step on this rank's share of a global batch."""
        result = self.gradient(batch)
        self.scaler.unscale_(self.optimizer)  # once, before LARS takes its norms
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.steps_done += 1
        return result

    def weights_are_finite(self) -> bool:
        """Whether all parameters and buffers are finite; waits for the device."""
        return bool(torch.stack([tensor.isfinite().all() for tensor in self.network.state_dict().values()]).all())

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a checkpoint's `state_dict` and step. Any kind of error may be raised if it does not fit."""
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.steps_done = saved["step"]
        self.scheduler.load_state_dict(saved["scheduler"])


def compiled(forward: M, on: bool) -> M:
    """A network, or a method of it, as `train.compile` wants it."""
    return cast(M, torch.compile(forward)) if on else forward


def resolve_precision(config: Config | FinetuneConfig, device: torch.device) -> str:
    """The precision that is used on a device."""
    if config.train.precision != "auto":
        return config.train.precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # Without these instructions bf16 is emulated, and slower than fp32. Torch has no public name for them.
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    # Of smaller views, a ResNet's last strided convolution sees one pixel. There oneDNN of torch 2.10 reads memory that
    # was never written, and the gradient may be NaN.
    return "bf16" if fast and config.geometry.side_px >= 32 else "fp32"

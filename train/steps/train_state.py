"""A network in training: its number formats, what a checkpoint holds of it, and the optimiser's part of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.steps.optim import learning_rate_factor

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
"""Precision -> type of the parameters, and type of autocast (None: no autocast)."""

N = TypeVar("N", bound=nn.Module)


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


def autocast_dtype(config: Config | FinetuneConfig, world: World) -> torch.dtype | None:
    """The type of autocast on this rank's device; None: no autocast."""
    return PRECISIONS[resolve_precision(config, world.device)][1]


def on_device(network: N, config: Config | FinetuneConfig, world: World) -> N:
    """The network on this rank's device, in the configured precision and memory layout."""
    dtype, _ = PRECISIONS[resolve_precision(config, world.device)]
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    for parameter in network.to(world.device, dtype).parameters():
        if parameter.ndim == 4:  # some models of timm have kernels of rank 5, which have no such layout
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return network


@dataclass(eq=False)
class TrainState:
    """A network in training.

    Attributes:
        scheduler: of the learning rate, by optimiser steps.
        scaler: scales the gradients of fp16, and is off for other precisions.
        total_steps: optimiser steps of the whole run.
        steps_done: optimiser steps so far.
        lr: learning rate of the newest step of this process.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: GradScaler
    total_steps: int
    steps_done: int = 0
    lr: float = field(init=False, default=0.0)

    @property
    def is_finished(self) -> bool:
        """Whether no step is left."""
        return self.steps_done >= self.total_steps

    def update(self) -> None:
        """Change the weights by the gradients, which are in `.grad`, scaled by the scaler."""
        self.scaler.unscale_(self.optimizer)  # once, before LARS takes its norms
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lr = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.steps_done += 1

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


def build_state(
    config: Config | FinetuneConfig, network: nn.Module, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> TrainState:
    """The state before the first step, on the network's device, with the configured learning rates and epochs."""
    total_steps = config.train.epochs * steps_per_epoch
    warmup_steps = round(config.optim.warmup_epochs * steps_per_epoch)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, total_steps, warmup_steps))
    device = next(network.parameters()).device
    scaler = GradScaler(device.type, enabled=resolve_precision(config, device) == "fp16")
    return TrainState(network, optimizer, scheduler, scaler, total_steps)

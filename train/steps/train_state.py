"""What a checkpoint holds of a network in training, and the optimiser's part of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.steps.optim import learning_rate_factor
from peclr_dali.train.steps.precision import resolve_precision


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

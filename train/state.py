"""Everything that a checkpoint holds, and the optimiser step that changes it."""

from __future__ import annotations

import copy
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from errors import UserError
from models.equivariance import build_undo
from models.network import build_network
from pipelines.batch import Batch
from train.config.pretraining import Config
from train.config.tables import first_difference, to_dict
from train.distributed.world import World
from train.runs.checkpoint import load_checkpoint
from train.steps.batch_statistics import synchronise
from train.steps.contrastive import ContrastiveStep, StepResult
from train.steps.free_memory import require_memory
from train.steps.optim import Lars, build_optimizer, learning_rate_factor

log = logging.getLogger(__name__)

Precision = tuple[torch.dtype, torch.dtype | None]
PRECISIONS: dict[str, Precision] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
"""Type of the parameters, and of autocast."""


class Result(Protocol):
    """What a step tells the loop."""

    @property
    def loss(self) -> Tensor:
        """Scalar, mean over the global batch, on the device."""

    def figures(self) -> dict[str, float]:
        """What a row of metrics says besides the loss; waits for the device."""


R = TypeVar("R", bound=Result)


class TrainingState(ABC, Generic[R]):
    """Everything that a checkpoint holds, and the step that changes it.

    Args:
        network: on its device, with its starting weights.
        optimizer: of its parameters.
        factor: of the learning rate after so many steps.
        scaler: of fp16's gradients; disabled for other precisions.

    Attributes:
        steps_done: optimiser steps so far.
        bad_files: what `train.runs.bad_files` has counted.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scaler: GradScaler,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, factor)
        self.scaler = scaler
        self.steps_done = 0
        self.bad_files: dict[str, Any] = {}

    @abstractmethod
    def gradient(self, batch: Batch) -> R:
        """Leave the gradient of a global batch in `.grad`, scaled by the scaler; `batch` is this rank's share."""

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

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "bad_files": copy.deepcopy(self.bad_files),  # which goes on counting while a checkpoint is written
        }

    def load_more(self, saved: Mapping[str, Any]) -> None:
        """What a kind of training adds to a checkpoint in its `state_dict`."""

    def weights_are_finite(self) -> bool:
        """Whether every parameter and buffer is a number; waits for the device."""
        tensors = [tensor for tensor in self.network.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def restore(self, path: Path, config: object, *, images: list[int]) -> None:
        """Go on from a checkpoint.

        Args:
            path: of the checkpoint.
            config: of the run, which must be the checkpoint's but for what is free to change.
            images: of each source, which must be as many as they were: the order depends on their numbers.

        Raises:
            UserError: the file is not readable, or of another run, data or model.
        """
        saved = load_checkpoint(path)
        difference = first_difference(saved["config"], to_dict(config))
        if difference is not None:
            raise UserError(f"{path} is of another run: {difference}. Put that run's own checkpoint there.")
        for key in (*self.state_dict(), "images"):
            if key not in saved:
                raise UserError(f"{path} is no checkpoint to go on from: it has no {key}. Use another one of this run.")
        if saved["images"] != images:
            before, now = (" + ".join(map(str, counts)) for counts in (saved["images"], images))
            raise UserError(
                f"{path} is of a run on {before} images, and there are {now} now: restore the data, or "
                f"start a new run with --set run.out=..."
            )
        try:
            self._load(saved)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # torch checks little of what it is given, and has many errors
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"{path} holds another model, or a state that does not fit it: {reason}") from error
        log.info("going on after step %d, from %s", self.steps_done, path)

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for group in self.optimizer.param_groups:
            if not all(isinstance(group[key], float) for key in ("lr", "initial_lr", "weight_decay")):
                raise TypeError("a learning rate or weight decay that is no number")
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                if not isinstance(value, Tensor) or value.shape not in (parameter.shape, ()):
                    raise ValueError(f"{name} of the optimiser does not fit a tensor of {tuple(parameter.shape)}")
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.steps_done = saved["step"]
        self.bad_files = saved["bad_files"]
        for row, (reason, times) in self.bad_files.get("met", {}).items():
            if not (isinstance(row, int) and isinstance(reason, str) and isinstance(times, int)):
                raise TypeError(f"bad file {row!r}: {reason!r}, {times!r}")
        self.scheduler.load_state_dict(saved["scheduler"])
        if self.steps_done < 0 or self.scheduler.last_epoch != self.steps_done:
            raise ValueError(f"step {self.steps_done}, but {self.scheduler.last_epoch} steps of the learning rate")
        self.load_more(saved)


class PretrainingState(TrainingState[StepResult]):
    """The state of pre-training.

    Args:
        config: of the run.
        world: this rank among all.
        steps_per_epoch: optimiser steps in an epoch.
        fresh: False if a checkpoint will be restored, so that no starting weights need to be read.

    Raises:
        UserError: the network does not fit into memory, or its starting weights cannot be used.
    """

    def __init__(self, config: Config, world: World, steps_per_epoch: int, *, fresh: bool) -> None:
        train = config.train
        self.precision = resolve_precision(train.precision, world.device)
        dtype, autocast_dtype = PRECISIONS[self.precision]
        random = dataclasses.replace(config.encoder, weights="random")
        widest = max(("hidden", "dim"), key=lambda name: int(getattr(config.projector, name)))
        keys = {
            "encoder": f"encoder.name = {config.encoder.name!r}",
            "projector": f"projector.{widest} = {getattr(config.projector, widest)}",
        }
        require_memory(lambda: build_network(random, config.projector), dtype, world, keys)
        encoder = config.encoder if fresh else random
        layout = torch.channels_last if train.channels_last else torch.contiguous_format
        network = build_network(encoder, config.projector).to(world.device, dtype)
        network.to(memory_format=layout)  # type: ignore[call-overload]  # torch documents it, its stubs do not
        if train.sync_batch_norm:
            synchronise(network, world, batch=train.batch, micro_batch=train.micro_batch)
        self._norm_ranks = world.world_size if train.sync_batch_norm else 1
        optimizer = build_optimizer(config.optim, network.named_parameters(), train.batch)
        warmup_steps = round(config.optim.warmup_epochs * steps_per_epoch)
        total_steps = train.epochs * steps_per_epoch
        super().__init__(
            network,
            optimizer,
            lambda step: learning_rate_factor(step, total_steps, warmup_steps),
            GradScaler(world.device.type, enabled=self.precision == "fp16"),
        )
        self.optimizer: Lars = optimizer
        compiled: nn.Module = torch.compile(network) if train.compile else network  # type: ignore[assignment]
        self.contrastive = ContrastiveStep(
            compiled,
            build_undo(config.equivariance, config.geometry.side_px),
            batch=train.batch,
            micro_batch=train.micro_batch,
            temperature=config.loss.temperature,
            recompute=train.recompute,
            autocast_dtype=autocast_dtype,
            scaler=self.scaler,
            world=world,
        )

    def gradient(self, batch: Batch) -> StepResult:
        """The contrastive gradient."""
        return self.contrastive(batch)

    def state_dict(self) -> dict[str, Any]:
        """With the number of ranks over which batch norm is taken."""
        return {**super().state_dict(), "norm_ranks": self._norm_ranks}

    def load_more(self, saved: Mapping[str, Any]) -> None:
        """Refuse another number of ranks if batch norm is taken over them."""
        if saved["norm_ranks"] != self._norm_ranks:
            raise UserError(
                f"the checkpoint was made with train.sync_batch_norm over {saved['norm_ranks']} ranks, and there are "
                f"{self._norm_ranks} now, which would train another function: start as many processes as before"
            )


def resolve_precision(precision: str, device: torch.device) -> str:
    """What "auto" means on a device."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

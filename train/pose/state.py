"""The state of fine-tuning: a pose network, Adam, and the best validation so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from models.pose import PoseNetwork, PoseOutput, build_pose_network
from pipelines.batch import Batch
from train.config.finetuning import FinetuneConfig
from train.distributed.world import World
from train.pose.step import PoseStep, PoseStepResult
from train.pose.targets import PoseLabels
from train.state import PRECISIONS, TrainingState, resolve_precision
from train.steps.free_memory import require_memory
from train.steps.optim import learning_rate_factor
from train.weights.starting_weights import start_pose_network


class FinetuningState(TrainingState[PoseStepResult]):
    """The state of fine-tuning.

    Args:
        config: of the run.
        world: this rank among all.
        steps_per_epoch: optimiser steps in an epoch.
        labels: of the training samples.
        fresh: False if a checkpoint will be restored, so that no starting weights need to be read.

    Attributes:
        best: step and figures of the best validation so far; empty before the first.

    Raises:
        UserError: the network does not fit into memory, or its starting weights cannot be used.
    """

    network: PoseNetwork

    def __init__(
        self, config: FinetuneConfig, world: World, steps_per_epoch: int, labels: PoseLabels, *, fresh: bool
    ) -> None:
        train = config.train
        self.precision = resolve_precision(train.precision, world.device)
        self._dtype, autocast_dtype = PRECISIONS[self.precision]
        random = dataclasses.replace(config.encoder, weights="random")

        def build() -> PoseNetwork:
            network = build_pose_network(random, config.pose)
            network.encoder.requires_grad_(not train.frozen)
            return network

        keys = {"encoder": f"encoder.name = {config.encoder.name!r}", "head": f"pose.hidden = {config.pose.hidden}"}
        require_memory(build, self._dtype, world, keys)
        encoder = config.encoder if fresh else random
        layout = torch.channels_last if train.channels_last else torch.contiguous_format
        network = start_pose_network(encoder, config.pose).to(world.device, self._dtype)
        network.to(memory_format=layout)  # type: ignore[call-overload]  # torch documents it, its stubs do not
        network.encoder.requires_grad_(not train.frozen)
        warmup_steps = round(config.optim.warmup_epochs * steps_per_epoch)
        total_steps = train.epochs * steps_per_epoch
        super().__init__(
            network,
            torch.optim.Adam(
                [parameter for parameter in network.parameters() if parameter.requires_grad],
                lr=config.optim.lr,
                weight_decay=config.optim.weight_decay,
                fused=True,
            ),
            lambda step: learning_rate_factor(step, total_steps, warmup_steps),
            GradScaler(world.device.type, enabled=self.precision == "fp16"),
        )
        self._frozen, self._labels = train.frozen, labels
        self._whole: nn.Module = torch.compile(network) if train.compile else network  # type: ignore[assignment]
        self._encoder: nn.Module = torch.compile(network.encoder) if train.compile else network.encoder  # type: ignore[assignment]
        self._step = PoseStep(
            network,
            self._forward,
            refined=config.pose.refine,
            weights=config.loss,
            batch=train.batch,
            micro_batch=train.micro_batch,
            autocast_dtype=autocast_dtype,
            scaler=self.scaler,
            world=world,
        )
        self.best: dict[str, Any] = {}
        self.train_mode()

    def train_mode(self) -> None:
        """Batch norm learns again, after a validation; a frozen encoder's never does."""
        self.network.train()
        if self._frozen:
            self.network.encoder.eval()

    def gradient(self, batch: Batch) -> PoseStepResult:
        """The gradient of the L1 losses."""
        return self._step(batch, self._labels.of_view(batch.views[0], batch.samples, self._dtype))

    def _forward(self, image: Tensor, intrinsics: Tensor) -> PoseOutput:
        if not self._frozen:
            output: PoseOutput = self._whole(image, intrinsics)
            return output
        with torch.no_grad():
            features = self._encoder(self.network.normalize(image))
        return self.network.from_features(features, intrinsics, side_px=image.shape[-1])

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {**super().state_dict(), "best": self.best}

    def load_more(self, saved: Mapping[str, Any]) -> None:
        """The best validation."""
        if saved["best"] and not all(isinstance(saved["best"].get(key), float) for key in ("pa_epe_cm", "epe_cm")):
            raise TypeError(f"the best validation is {saved['best']!r}")
        self.best = saved["best"]

"""Contrastive pre-training: the loop, to be read from top to bottom."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from errors import UserError
from models.equivariance import build_undo
from models.health import health
from models.network import build_network
from pipelines.batch import Batch
from pipelines.index import Index
from pipelines.loader import Loader
from pipelines.order import EpochOrder, RankSlice
from pipelines.sources import load_index
from train.checkpoint import load_checkpoint
from train.config import Config, first_difference, to_dict
from train.contrastive_step import ContrastiveStep, StepResult
from train.distributed import World, init_distributed, shutdown
from train.log import RunLog
from train.optim import build_optimizer, learning_rate_factor
from train.pictures import save_loss, save_views
from train.run_folder import Resume, RunFolder, cut_jsonl

log = logging.getLogger(__name__)

Precision = tuple[torch.dtype, torch.dtype | None]
_PRECISIONS: dict[str, Precision] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
"""Type of the parameters, and of autocast."""


class Interrupted(Exception):  # noqa: N818  asked for, not an error
    """The run was asked to stop, has saved and can be resumed."""

    def __init__(self, signal_number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + signal_number
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} after step {step}, saved in {folder}; go on with --resume auto")


def pretrain(config: Config, resume: Resume = "never") -> RunFolder:
    """Pre-train an encoder as configured; under torchrun, every rank calls this.

    Returns:
        The run's folder, with metrics, pictures and checkpoints.

    Raises:
        UserError: the input cannot be used, or the loss stopped being a number.
        Interrupted: SIGTERM or Ctrl-C came; the state is saved.
    """
    world = init_distributed(config.train.device)
    try:
        return _pretrain(config, resume, world)
    finally:
        shutdown()


def _pretrain(config: Config, resume: Resume, world: World) -> RunFolder:
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.run.seed)

    index = load_index(config.data)
    steps_per_epoch = _steps_per_epoch(index, config)
    total_steps = steps_per_epoch * config.train.epochs
    order = EpochOrder(len(index), steps_per_epoch * config.train.batch, seed=config.run.seed)

    folder = RunFolder(Path(config.run.out), keep=config.run.keep)
    checkpoint = _claim(folder, config, resume, world)

    state = _State(config, world, steps_per_epoch, fresh=checkpoint is None)
    if checkpoint is not None:
        state.restore(checkpoint, config)
    if state.steps_done >= total_steps:
        log.info("%s has finished its %d steps already", folder.root, total_steps)
        return folder

    share = state.contrastive.share
    loader = Loader(
        index,
        order,
        RankSlice(config.train.batch, share.start, share.stop),
        config.pipelines,
        config.geometry,
        config.colour,
        seed=config.run.seed,
        device=world.device,
        first_step=state.steps_done,
        last_step=total_steps,
        processes_here=world.local_world_size,
    )
    if world.is_main:
        log.info(
            "%d images, %d steps per epoch, %s backend on %s, %s inside LARS, %s",
            len(index), steps_per_epoch, loader.backend, world.device, state.optimizer.inner_name, state.precision,
        )  # fmt: skip

    with loader, _StopSignals() as stop, _Meter(config, folder, state, world, total_steps) as meter:
        for batch in meter.timed(loader):
            if world.is_main and state.steps_done == 0:
                save_views(folder.views_picture, batch, index)

            result = state.step(batch.to(world.device))

            done = state.steps_done
            last = done == total_steps
            meter.after_step(batch, result, log_now=last or done % config.run.log_every == 0)
            stopping = stop.agreed(world, ask=done % config.run.log_every == 0)
            if last or stopping or done % config.run.checkpoint_every == 0:
                meter.require_finite(result)
                _save(folder, config, state, world)
            if stopping and not last:
                raise Interrupted(stop.signal_number, done, folder.root)

    if world.is_main:
        save_loss(folder.loss_picture, folder.read_metrics(), start=math.log(2 * config.train.batch - 1))
    return folder


def _steps_per_epoch(index: Index, config: Config) -> int:
    steps = len(index) // config.train.batch
    if steps == 0:
        raise UserError(
            f"{index.root} has {len(index)} images, fewer than train.batch = {config.train.batch}: "
            f"use more images or a smaller batch"
        )
    return steps


def _claim(folder: RunFolder, config: Config, resume: Resume, world: World) -> Path | None:
    """Rank 0 takes the run folder; all ranks learn what to go on from."""
    found: list[Any] = [None, None]
    if world.is_main:
        try:
            found[0] = folder.claim(config, resume)
        except UserError as error:
            found[1] = error
    if world.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    checkpoint: Path | None = found[0]
    return checkpoint


class _State:
    """Everything that a checkpoint holds, and the step that changes it."""

    def __init__(self, config: Config, world: World, steps_per_epoch: int, *, fresh: bool) -> None:
        train = config.train
        self.precision = _resolve_precision(train.precision, world.device)
        dtype, autocast_dtype = _PRECISIONS[self.precision]
        encoder = config.encoder if fresh else dataclasses.replace(config.encoder, weights="random")
        layout = torch.channels_last if train.channels_last else torch.contiguous_format
        self.network = build_network(encoder, config.projector).to(world.device, dtype, memory_format=layout)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.optimizer = build_optimizer(config.optim, self.network.named_parameters(), train.batch)
        warmup_steps = round(config.optim.warmup_epochs * steps_per_epoch)
        total_steps = train.epochs * steps_per_epoch
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, total_steps, warmup_steps))
        network: nn.Module = torch.compile(self.network) if train.compile else self.network  # type: ignore[assignment]
        self.contrastive = ContrastiveStep(
            network,
            build_undo(config.equivariance, config.geometry.side_px),
            batch=train.batch,
            micro_batch=train.micro_batch,
            temperature=config.loss.temperature,
            recompute=train.recompute,
            autocast_dtype=autocast_dtype,
            scaler=self.scaler,
            world=world,
        )
        self.steps_done = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def step(self, batch: Batch) -> StepResult:
        """One optimiser step on this rank's share of a global batch."""
        result = self.contrastive(batch)
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
            "scheduler": {"last_epoch": self.scheduler.last_epoch},
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, path: Path, config: Config) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: the file is not readable, or of another run or model.
        """
        saved = load_checkpoint(path)
        difference = first_difference(saved["config"], to_dict(config))
        if difference is not None:
            raise UserError(f"{path} is of another run: {difference}")
        try:
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{path} holds another model: {' '.join(str(error).split())[:200]}") from error
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.steps_done = saved["step"]
        self.scheduler.last_epoch = self.steps_done
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        log.info("going on after step %d, from %s", self.steps_done, path)


def _resolve_precision(precision: str, device: torch.device) -> str:
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _save(folder: RunFolder, config: Config, state: _State, world: World) -> None:
    if world.is_main:
        folder.checkpoints.save(state.steps_done, {"config": to_dict(config), **state.state_dict()})
        save_loss(folder.loss_picture, folder.read_metrics(), start=math.log(2 * config.train.batch - 1))
    world.barrier()


class _StopSignals:
    """Turns SIGTERM and Ctrl-C into a wish that is granted between two steps; a second Ctrl-C is granted at once."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

    def agreed(self, world: World, *, ask: bool) -> bool:
        """Whether to stop now. Ranks ask each other, so that all stop after the same step; that takes a message."""
        if world.world_size == 1:
            return self.signal_number != 0
        if not ask:
            return False
        self.signal_number = int(world.max_(torch.tensor(self.signal_number, device=world.device)))
        return self.signal_number != 0


class _Meter:
    """Measures the loop and writes down what it measured."""

    def __init__(self, config: Config, folder: RunFolder, state: _State, world: World, total_steps: int) -> None:
        self._config, self._folder, self._state, self._world = config, folder, state, world
        self._total_steps = total_steps
        self._log = RunLog(folder, first_step=state.steps_done, total_steps=total_steps) if world.is_main else None
        self._samples = self._open_samples() if config.run.log_samples else None
        self._waited_s, self._steps, self._since = 0.0, 0, time.perf_counter()
        self._lr = state.lr

    def __enter__(self) -> _Meter:
        if self._log is not None:
            self._log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.__exit__(kind, error, trace)
        if self._samples is not None:
            self._samples.close()

    def timed(self, loader: Loader) -> Any:
        """The loader's batches; the time that each was waited for counts."""
        batches = iter(loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._waited_s += time.perf_counter() - start
            if batch is None:
                return
            self._lr = self._state.lr
            yield batch

    def after_step(self, batch: Batch, result: StepResult, *, log_now: bool) -> None:
        """Count a step, and write a row of metrics if it is time: only then does anything wait for the device."""
        self._steps += 1
        step = self._state.steps_done
        if self._samples is not None:
            row = {"step": step, "first": int(batch.positions[0]), "samples": batch.samples.tolist()}
            self._samples.write(json.dumps(row) + "\n")
        if self._log is not None:
            self._log.advance(step)
        if not log_now:
            return
        self.require_finite(result)
        elapsed_s = time.perf_counter() - self._since
        if self._log is not None:
            figures = health(result.embeddings)
            row = {
                "step": step,
                "epoch": step / (self._total_steps / self._config.train.epochs),
                "loss": result.loss.item(),
                "lr": self._lr,
                "images_per_s": self._steps * self._config.train.batch / elapsed_s,
                "wait_share": self._waited_s / elapsed_s,
                "alignment": figures.alignment.item(),
                "uniformity": figures.uniformity.item(),
                "positive_rank": figures.positive_rank.item(),
                "eta_s": (self._total_steps - step) * elapsed_s / self._steps,
            }
            self._log.write(row)
        self._waited_s, self._steps, self._since = 0.0, 0, time.perf_counter()

    def require_finite(self, result: StepResult) -> None:
        """Stop a run whose loss is no number any more; all ranks see the same loss.

        Raises:
            UserError: with the step, the learning rate and where to go back to.
        """
        loss = result.loss.item()
        if math.isfinite(loss):
            return
        last = self._folder.checkpoints.latest()
        raise UserError(
            f"the loss is {loss} at step {self._state.steps_done}, learning rate {self._lr:.3g}; the last good "
            f"checkpoint is {last or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )

    def _open_samples(self) -> TextIO:
        path = self._folder.root / f"samples-rank{self._world.rank}.jsonl"
        cut_jsonl(path, self._state.steps_done)
        return path.open("a", buffering=1)

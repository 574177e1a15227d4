"""Contrastive pre-training: the loop, to be read from top to bottom."""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from errors import UserError
from pipelines.index import Index
from pipelines.loader import Loader
from pipelines.order import RankSlice, build_order, rows_per_batch
from pipelines.sources import load_index
from train.config import Config, to_dict
from train.distributed import World, described_world, join, micro_batch_share, shutdown
from train.interrupt import Interrupted, StopSignals
from train.meter import Meter
from train.pictures import save_loss, save_views
from train.run_folder import Resume, RunFolder
from train.state import TrainingState

log = logging.getLogger(__name__)


def pretrain(config: Config, resume: Resume = "never") -> RunFolder:
    """Pre-train an encoder as configured; under torchrun, every rank calls this.

    Returns:
        The run's folder, with metrics, pictures and checkpoints.

    Raises:
        UserError: the input cannot be used, or the loss stopped being a number.
        Interrupted: SIGTERM or Ctrl-C came; the state is saved.
    """
    world = described_world(config.train.device)
    share = micro_batch_share(config.train.batch, config.train.micro_batch, world.rank, world.world_size)
    join(world)  # only now, so that no rank waits for others that the check above has sent away
    try:
        return _pretrain(config, resume, world, share)
    finally:
        shutdown()


def _pretrain(config: Config, resume: Resume, world: World, share: range) -> RunFolder:
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.run.seed)

    index = load_index(config.data)
    steps_per_epoch = _steps_per_epoch(index, config)
    total_steps = steps_per_epoch * config.train.epochs
    order = build_order(index, batch=config.train.batch, seed=config.run.seed)

    folder = RunFolder(Path(config.run.out), keep=config.run.keep)
    checkpoint = _where_to_go_on(folder, config, resume, world)
    state = TrainingState(config, world, steps_per_epoch, fresh=checkpoint is None)
    if checkpoint is not None:
        state.restore(checkpoint, config, images=index.counts)
    if state.steps_done >= total_steps:
        log.info("%s has finished its %d steps already", folder.root, total_steps)
        return folder
    if world.is_main:
        folder.claim(config)  # only now: a run that could not start leaves nothing behind
    world.barrier()

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
            "%d images (%d without a box: all of it), %d steps per epoch, %s backend on %s, %s, %s",
            len(index),
            (index.box_px[:, 2] == 0).sum(),
            steps_per_epoch,
            loader.backend,
            world.device,
            state.optimizer.describe(),
            state.precision,
        )
        if index.sources:
            rows = rows_per_batch([source.weight for source in index.sources], config.train.batch)
            parts = zip(rows, index.sources, strict=True)
            log.info("of every batch: %s", ", ".join(f"{count} of {part.name} ({part.count})" for count, part in parts))

    gc.freeze()  # what is here now stays: the collector need not go through it again and again
    with loader, StopSignals() as stop, Meter(config, folder, state, world, total_steps) as meter:
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
                _save(folder, config, state, world, images=index.counts)
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


def _where_to_go_on(folder: RunFolder, config: Config, resume: Resume, world: World) -> Path | None:
    """Rank 0 looks into the run's folder; all ranks learn which checkpoint to go on from, if any."""
    found: list[Any] = [None, None]
    if world.is_main:
        try:
            found[0] = folder.check(config, resume)
        except UserError as error:
            found[1] = error
    if world.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    checkpoint: Path | None = found[0]
    return checkpoint


def _save(folder: RunFolder, config: Config, state: TrainingState, world: World, *, images: list[int]) -> None:
    """Write a checkpoint and the picture of the loss; weights that are no numbers are never saved."""
    if not state.weights_are_finite():  # the same on all ranks
        raise UserError(
            f"weights stopped being numbers at step {state.steps_done}, learning rate {state.lr:.3g}; the last good "
            f"checkpoint is {folder.checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )
    if world.is_main:
        saved = {"config": to_dict(config), "images": images, **state.state_dict()}
        folder.checkpoints.save(state.steps_done, saved)
        save_loss(folder.loss_picture, folder.read_metrics(), start=math.log(2 * config.train.batch - 1))
    world.barrier()

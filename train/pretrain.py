"""Contrastive pre-training, from a configuration to a finished run."""

from __future__ import annotations

import logging
import math
from functools import partial

import torch

from pipelines.loader import Loader
from pipelines.render.backends import prepare_process
from pipelines.samples.order import RankSlice, Schedule, build_order, rows_per_batch
from pipelines.sources import load_index
from train.config import Config
from train.distributed.launcher import leaving_with_launcher
from train.distributed.together import together
from train.distributed.world import World, described_world, joined, micro_batch_share
from train.loop import claim, folder_in_use, restore, run_steps, set_threads, steps_per_epoch, where_to_go_on
from train.pictures import save_loss
from train.runs.folder import Resume, RunFolder
from train.state import PretrainingState

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
    # Only now, so that no rank waits for others that the check above has sent away.
    with (
        leaving_with_launcher(),
        joined(world, config.run.rank_timeout_s),
        folder_in_use(config, resume, world) as folder,
    ):
        _pretrain(config, folder, resume, world, share)
    return folder


def _pretrain(config: Config, folder: RunFolder, resume: Resume, world: World, share: range) -> None:
    set_threads(config.train.threads, world)
    prepare_process(config.pipelines, world.device)
    torch.manual_seed(config.run.seed)

    index = together(world, lambda: load_index(config.data))
    epoch_steps = together(world, lambda: steps_per_epoch(index, config.train.batch))
    total_steps = epoch_steps * config.train.epochs
    order = build_order(index, batch=config.train.batch, seed=config.run.seed)

    checkpoint = where_to_go_on(folder, config, resume, world)
    state = together(world, lambda: PretrainingState(config, world, epoch_steps, fresh=checkpoint is None))
    restore(state, checkpoint, config, world, images=index.counts)
    if state.steps_done >= total_steps:
        log.info("%s has finished its %d steps already", folder.root, total_steps)
        return
    claim(folder, config, state, world)  # only now: a run that could not start leaves nothing behind

    make_loader = partial(
        Loader,
        index,
        Schedule(
            order,
            RankSlice(config.train.batch, share.start, share.stop),
            first_step=state.steps_done,
            last_step=total_steps,
        ),
        config.pipelines,
        config.augmentation,
        device=world.device,
        processes_here=world.local_world_size,
    )
    loader = together(world, make_loader)
    if world.is_main:
        log.info(
            "%d images (%d without a box: all of it), %d steps per epoch, %s backend on %s, %s, %s",
            len(index),
            (index.box_px[:, 2] == 0).sum(),
            epoch_steps,
            loader.backend,
            world.device,
            state.optimizer.describe(),
            state.precision,
        )
        if index.sources:
            rows = rows_per_batch([source.weight for source in index.sources], config.train.batch)
            parts = zip(rows, index.sources, strict=True)
            log.info("of every batch: %s", ", ".join(f"{count} of {part.name} ({part.count})" for count, part in parts))

    run_steps(
        config,
        folder,
        index,
        loader,
        state,
        world,
        total_steps,
        title="pre-training",
        draw=lambda: _draw_loss(folder, config),
    )


def _draw_loss(folder: RunFolder, config: Config) -> None:
    if rows := folder.read_metrics():  # none yet if the run is stopped before its first
        save_loss(folder.loss_picture, rows, start=math.log(2 * config.train.batch - 1))

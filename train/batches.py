"""The images of a run, and the batches of its steps."""

from __future__ import annotations

import logging

from peclr_dali.pipelines.loader.loader import Loader
from peclr_dali.pipelines.loader.read import Quarantine
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order, steps_per_epoch
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.distributed.all_ranks import on_all_ranks, require_same
from peclr_dali.train.runs.run import AnyRun
from peclr_dali.train.steps.precision import resolve_precision
from peclr_dali.train.steps.train_state import TrainState

log = logging.getLogger(__name__)


def load_images(run: AnyRun) -> tuple[Index, int]:
    """The images, and the optimiser steps of an epoch.

    Raises:
        UserError: the images cannot be used, are fewer than a batch, or differ between ranks.
    """
    world, train = run.world, run.config.train
    with on_all_ranks(world):
        index = load_index(run.config.data)
    require_same(world, "data", index.in_words(), "Make data.root alike on all hosts")
    with on_all_ranks(world):
        steps = steps_per_epoch(index, train.batch, micro_batch=train.micro_batch, world_size=world.world_size)
    return index, steps


def load_batches(run: AnyRun, index: Index, state: TrainState, quarantine: Quarantine, *, views: int) -> Loader:
    """The loader of this rank's share of every batch that is left."""
    config, world, train = run.config, run.world, run.config.train
    share = micro_batch_share(train.batch, train.micro_batch, world.rank, world.world_size)
    order = build_order(index, batch=train.batch, seed=config.run.seed)
    rows = RankSlice(train.batch, share.start, share.stop)
    schedule = Schedule(order, rows, first_step=state.steps_done, last_step=state.total_steps)
    with on_all_ranks(world):
        loader = Loader(
            index, schedule, config.pipelines, config.augmentation,
            device=world.device, views=views, processes_here=world.local_world_size, quarantine=quarantine,
        )  # fmt: skip
    steps, where = state.total_steps // train.epochs, loader.settings.described
    precision = resolve_precision(config, world.device)
    log.info("%d images, %d steps per epoch, %s on %s, %s", len(index), steps, where, world.device, precision)
    return loader

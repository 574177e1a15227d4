"""What a run begins with: its ranks, its folder, its images, and the loader of their batches."""

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import torch

from peclr_dali.machine import available_cores
from peclr_dali.models.config import EncoderConfig
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.loader.prepare import Quarantine
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule, build_order, steps_per_epoch
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import FREE_BETWEEN_RANKS, first_different_key, flatten, to_dict
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, described_world, joined, on_all_ranks, require_same
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.steps.train_state import TrainState, resolve_precision

log = logging.getLogger(__name__)

C = TypeVar("C", Config, FinetuneConfig)


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run whose ranks are connected and whose folder is locked.

    Attributes:
        config: its configuration. If it is resumed, it names the weights that the run began with.
        checkpoint: to go on from; None: start anew.
        check: whether to end before the first update of the weights, and to write nothing.
    """

    config: C
    world: World
    folder: RunFolder
    checkpoint: Path | None = None
    check: bool = False

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder to build. If a checkpoint will be restored, no starting weights are read."""
        encoder = self.config.encoder
        return encoder if self.checkpoint is None else replace(encoder, weights="random")


AnyRun: TypeAlias = Run[Config] | Run[FinetuneConfig]


@contextmanager
def started_run(config: C, resume: Resume, *, check: bool) -> Iterator[Run[C]]:
    """Connect the ranks, lock the folder, and set threads and seed; disconnect at the end of the `with` block.

    Raises:
        UserError: the environment is inconsistent, batch, micro-batch and number of ranks do not fit each other, the
            ranks differ, or the folder cannot be used.
    """
    train, world = config.train, described_world(config.train.device)
    # Before the ranks connect: if this check fails, it fails on all ranks, and none waits for another.
    micro_batch_share(train.batch, train.micro_batch, world.rank, world.world_size)
    folder = RunFolder(Path(config.run.out), keep=config.run.keep)
    checkpoint, encoder = None, config.encoder
    with joined(world, config.run.rank_timeout_s), ExitStack() as held:
        _require_same_configuration(world, config)
        with on_all_ranks(world):
            if world.is_main:
                held.enter_context(folder.lock())
                checkpoint = folder.check(config, resume)
                encoder = config.encoder if checkpoint is None else folder.read_config().encoder
        checkpoint, encoder = world.gather_objects((checkpoint, encoder))[0]
        held.callback(gc.unfreeze)  # of what training froze
        set_threads(train.threads, world)
        torch.manual_seed(config.run.seed)
        yield Run(replace(config, encoder=encoder), world, folder, checkpoint, check)


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
    schedule = Schedule(order, train.batch, share, first_step=state.steps_done, last_step=state.total_steps)
    with on_all_ranks(world):
        loader = build_loader(
            index, schedule, config.pipelines, config.augmentation,
            device=world.device, views=views, processes_here=world.local_world_size, quarantine=quarantine,
        )  # fmt: skip
    hands, images = len(index), len(set(index.paths))
    log.info(
        "%s from %s: %s, %d steps per epoch, %s on %s, %s",
        *(config.encoder.name, config.encoder.weights),
        f"{images} images" if hands == images else f"{hands} hands in {images} images",
        *(state.total_steps // train.epochs, loader.settings.described),
        *(world.device, resolve_precision(config, world.device)),
    )
    return loader


def set_threads(threads: int | None, world: World) -> None:
    """Set torch's CPU threads: as configured, but no more than cores, else this process's share of the cores.

    torchrun's default is one thread per process. A single process keeps torch's choice, limited by the quota of CPU
    time.
    """
    cores = available_cores()
    share = max(1, cores // world.local_world_size)
    usual = share if world.local_world_size > 1 else min(share, torch.get_num_threads())
    torch.set_num_threads(min(threads or usual, cores))  # more would wait for each other


def _require_same_configuration(world: World, config: Config | FinetuneConfig) -> None:
    """Ranks with other settings would wait for each other in vain, or train other weights without a message."""
    mine = dict(flatten(to_dict(config)))
    everybody = world.gather_objects(mine)
    for other in everybody:
        if (key := first_different_key(everybody[0], other, FREE_BETWEEN_RANKS)) is not None:
            require_same(
                world, f"values of {key}", repr(mine.get(key)), "Start all ranks with the same files and options"
            )
    require_same(
        world,
        "precisions",
        resolve_precision(config, world.device),
        "Set train.precision to one that all hosts have",
    )

"""The loop of every run: its steps, and around them how long it is, where it goes on, how it is saved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from errors import UserError
from machine.cores import available_cores, warn_of_threads
from pipelines.loader import Loader
from pipelines.samples.index import Index
from train.config import Config, to_dict
from train.distributed.together import Together, together
from train.distributed.world import World
from train.finetune_config import FinetuneConfig
from train.pictures import save_views
from train.runs.bad_files import BadFiles
from train.runs.checkpoint import BackgroundWriter, Checkpoints
from train.runs.folder import Resume, RunFolder
from train.runs.interrupt import Interrupted, StopSignals
from train.runs.meter import Meter
from train.state import TrainingState


def set_threads(threads: int | None, world: World) -> None:
    """Torch's CPU threads: as configured, else a share of the cores for each of several processes of a machine.

    torchrun would leave each a single one. A single process keeps torch's choice, which knows no quota of CPU time,
    up to the cores that it may use. A warning tells of more than twice the cores.
    """
    if threads is None:
        share = max(1, available_cores() // world.local_world_size)
        threads = share if world.local_world_size > 1 else min(share, torch.get_num_threads())
    elif world.is_main:
        warn_of_threads("train.threads", threads, world.local_world_size)
    torch.set_num_threads(threads)


def steps_per_epoch(index: Index, batch: int) -> int:
    """Whole batches that the samples give; what does not fill one sits the epoch out.

    Raises:
        UserError: there are fewer samples than one batch needs.
    """
    steps = len(index) // batch
    if steps == 0:
        raise UserError(
            f"{index.root} has {len(index)} images, fewer than train.batch = {batch}: "
            f"use more images or a smaller batch"
        )
    return steps


@contextmanager
def folder_in_use(config: Config | FinetuneConfig, resume: Resume, world: World) -> Iterator[RunFolder]:
    """The run's folder, locked by rank 0 against other runs until the block ends.

    Raises:
        UserError: on every rank, if another process writes there, or the folder cannot be used.
    """
    folder = RunFolder(Path(config.run.out), keep=config.run.keep)
    with ExitStack() as held:
        together(world, lambda: held.enter_context(folder.lock(config, resume)) if world.is_main else None)
        yield folder


def where_to_go_on(folder: RunFolder, config: object, resume: Resume, world: World) -> Path | None:
    """Rank 0 looks into the run's folder; all ranks learn which checkpoint to go on from, if any.

    Raises:
        UserError: on every rank, if the folder cannot be used.
    """
    found = together(world, lambda: folder.check(config, resume) if world.is_main else None)
    return world.gather_objects(found)[0]


def restore(
    state: TrainingState[Any], checkpoint: Path | None, config: object, world: World, *, images: list[int]
) -> None:
    """Go on from a checkpoint, if there is one, on every rank.

    Raises:
        UserError: on every rank, if one of them cannot.
    """
    if checkpoint is not None:
        together(world, lambda: state.restore(checkpoint, config, images=images))


def claim(folder: RunFolder, config: object, state: TrainingState[Any], world: World) -> None:
    """Rank 0 takes the folder for the run and forgets what comes after the state's step.

    Raises:
        UserError: on every rank, if the folder cannot be written to.
    """
    together(world, lambda: folder.claim(config, state.steps_done) if world.is_main else None)


def run_steps(
    config: Config | FinetuneConfig,
    folder: RunFolder,
    index: Index,
    loader: Loader,
    state: TrainingState[Any],
    world: World,
    total_steps: int,
    *,
    title: str,
    draw: Callable[[], None],
    after_step: Callable[[Meter], None] = lambda meter: None,
) -> None:
    """Take the steps that are left: load, compute, log, save, and stop where the ranks agree to.

    Args:
        config: of the run.
        folder: where it writes.
        index: its images.
        loader: closed in the end.
        state: what its steps change.
        world: the ranks, of which each calls this.
        total_steps: of the whole run, those that are done included.
        title: of the progress bar.
        draw: the run's curves; called in the background after each checkpoint.
        after_step: what else a step needs, such as a validation now and then.

    Raises:
        UserError: the loss stopped being a number, too many files are bad, or the disk is full.
        Interrupted: SIGTERM or Ctrl-C came; the state is saved.
    """
    bad_files = together(
        world, lambda: BadFiles(index, config.data, folder.quarantine_file, state, world, loader.quarantine)
    )
    gc.freeze()  # what is here now stays: the collector need not go through it again and again
    with (
        loader,
        StopSignals() as stop,
        BackgroundWriter(folder.checkpoints, draw) as writer,
        Meter(config, folder, state, world, total_steps, writer=writer, title=title) as meter,
    ):
        ranks = Together(world, stop, meter.check)
        for batch in ranks.each(meter.timed(loader)):
            if world.is_main and state.steps_done == 0:
                with meter.writing():
                    save_views(folder.views_picture, batch, index)

            result = state.step(batch.to(world.device))

            done = state.steps_done
            last = done == total_steps
            log_now = last or done % config.run.log_every == 0
            stopping = ranks.stopping
            save_now = last or stopping or done % config.run.checkpoint_every == 0
            if log_now or save_now:
                together(world, partial(meter.require_finite, result))
            meter.after_step(batch, result, log_now=log_now)
            after_step(meter)
            with meter.writing():
                bad_files.count(batch, agree=log_now or save_now)
            if save_now or bad_files.too_many:
                _save(writer, config, state, world, images=index.counts)
            if bad_files.too_many:
                together(world, writer.finish)
                together(world, bad_files.require_few)
            if stopping and not last:
                together(world, writer.finish)
                raise Interrupted(stop.signal_number, done, folder.root)
        together(world, writer.finish)


def _save(
    writer: BackgroundWriter, config: object, state: TrainingState[Any], world: World, *, images: list[int]
) -> None:
    """Have rank 0 write a checkpoint in the background; weights that are no numbers are never saved.

    Args:
        writer: of the run's folder.
        config: of the run, kept in the checkpoint.
        state: what to keep.
        world: the ranks, of which none waits for the disk.
        images: in the index.

    Raises:
        UserError: on every rank, if the weights are no numbers any more.
    """
    together(world, lambda: _require_finite_weights(writer.checkpoints, state))
    if world.is_main:
        writer.save(state.steps_done, {"config": to_dict(config), "images": images, **state.state_dict()})


def _require_finite_weights(checkpoints: Checkpoints, state: TrainingState[Any]) -> None:
    if not state.weights_are_finite():
        raise UserError(
            f"weights stopped being numbers at step {state.steps_done}, learning rate {state.lr:.3g}; the last good "
            f"checkpoint is {checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )

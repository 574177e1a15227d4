"""What the training loops share around their steps: how long a run is, where it goes on, how it is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import UserError
from pipelines.index import Index
from train.config import to_dict
from train.distributed import World
from train.run_folder import Resume, RunFolder
from train.state import TrainingState


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


def where_to_go_on(folder: RunFolder, config: object, resume: Resume, world: World) -> Path | None:
    """Rank 0 looks into the run's folder; all ranks learn which checkpoint to go on from, if any.

    Raises:
        UserError: on every rank, if the folder cannot be used.
    """
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


def save(
    folder: RunFolder,
    config: object,
    state: TrainingState[Any],
    world: World,
    *,
    images: list[int],
    draw: Callable[[], None],
) -> None:
    """Write a checkpoint and then the pictures; weights that are no numbers are never saved.

    Args:
        folder: of the run.
        config: of the run, kept in the checkpoint.
        state: what to keep.
        world: rank 0 writes, the others wait.
        images: in the index.
        draw: draws the pictures that tell how the run goes.

    Raises:
        UserError: the weights are no numbers any more.
    """
    if not state.weights_are_finite():  # the same on all ranks
        raise UserError(
            f"weights stopped being numbers at step {state.steps_done}, learning rate {state.lr:.3g}; the last good "
            f"checkpoint is {folder.checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )
    if world.is_main:
        folder.checkpoints.save(state.steps_done, {"config": to_dict(config), "images": images, **state.state_dict()})
        draw()
    world.barrier()

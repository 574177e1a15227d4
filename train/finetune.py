"""Fine-tuning to 3D hand pose, from a configuration to a finished run."""

from __future__ import annotations

import logging
from functools import partial

import torch

from errors import UserError
from pipelines.loader import Loader
from pipelines.render.backends import prepare_process
from pipelines.samples.order import RankSlice, Schedule, build_order
from pipelines.sources import load_index
from train.config import to_dict
from train.distributed.launcher import leaving_with_launcher
from train.distributed.together import together
from train.distributed.world import World, described_world, joined, micro_batch_share
from train.finetune_config import FinetuneConfig
from train.loop import claim, folder_in_use, restore, run_steps, set_threads, steps_per_epoch, where_to_go_on
from train.pose.inference import Poses
from train.pose.pictures import save_curves, save_predictions
from train.pose.state import FinetuningState
from train.pose.targets import PoseLabels
from train.pose.validation import Validation, best_of, load_validation, validate
from train.runs.folder import Resume, RunFolder
from train.runs.meter import Meter

log = logging.getLogger(__name__)


def finetune(config: FinetuneConfig, resume: Resume = "never") -> RunFolder:
    """Fine-tune an encoder to 3D hand pose as configured; under torchrun, every rank calls this.

    Returns:
        The run's folder, with metrics, pictures, checkpoints and the best one on validation.

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
        _finetune(config, folder, resume, world, share)
    return folder


def _finetune(config: FinetuneConfig, folder: RunFolder, resume: Resume, world: World, share: range) -> None:
    set_threads(config.train.threads, world)
    prepare_process(config.pipelines, world.device)
    torch.manual_seed(config.run.seed)

    index = together(world, lambda: load_index(config.data))
    labels = together(world, lambda: PoseLabels(index, config.pose))
    validation = together(world, lambda: load_validation(config))
    epoch_steps = together(world, lambda: steps_per_epoch(index, config.train.batch))
    total_steps = epoch_steps * config.train.epochs
    validate_every = max(1, round(config.validation.every_epochs * epoch_steps))
    order = build_order(index, batch=config.train.batch, seed=config.run.seed)

    checkpoint = where_to_go_on(folder, config, resume, world)
    state = together(world, lambda: FinetuningState(config, world, epoch_steps, labels, fresh=checkpoint is None))
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
        views=1,
        processes_here=world.local_world_size,
    )
    loader = together(world, make_loader)
    if world.is_main:
        log.info(
            "%d labelled images, %s held out for validation, %d steps per epoch, %s backend on %s, %s encoder %s, %s",
            len(index),
            len(validation.index) if validation is not None else "none",
            epoch_steps,
            loader.backend,
            world.device,
            "frozen" if config.train.frozen else "trained",
            f"{config.encoder.name} from {config.encoder.weights}",
            state.precision,
        )

        if config.train.frozen and config.encoder.weights == "random":
            log.warning("the encoder stays random (train.frozen = true): --from RUN gives it weights")

    def validate_if_due(meter: Meter) -> None:
        done = state.steps_done
        if validation is not None and (done == total_steps or done % validate_every == 0):
            with meter.paused():
                meter.validated(_validate(config, folder, state, validation, world))

    run_steps(
        config,
        folder,
        index,
        loader,
        state,
        world,
        total_steps,
        title="fine-tuning",
        draw=lambda: _draw_curves(folder),
        after_step=validate_if_due,
    )


def _validate(
    config: FinetuneConfig, folder: RunFolder, state: FinetuningState, validation: Validation, world: World
) -> dict[str, float]:
    """Measure on held-out images; the best network so far is kept in a checkpoint and a picture of its own."""
    figures, poses = validate(state.network, validation, config, world)
    state.train_mode()
    row = {"step": state.steps_done, **figures}
    if not state.best or best_of([state.best, row]) is row:
        state.best = row
        together(world, lambda: _keep_best(config, folder, state, validation, poses) if world.is_main else None)
    return row


def _keep_best(
    config: FinetuneConfig, folder: RunFolder, state: FinetuningState, validation: Validation, poses: Poses
) -> None:
    saved = {"config": to_dict(config), "validation": state.best, "network": state.network.state_dict()}
    try:
        folder.best.save(state.steps_done, saved)
        save_predictions(folder.predictions_picture, poses, validation)
    except OSError as error:
        raise UserError(
            f"{folder.best.folder} cannot be written to: {error.strerror or error}. Make room or set the folder's "
            f"rights, then go on with --resume auto"
        ) from error


def _draw_curves(folder: RunFolder) -> None:
    if rows := folder.read_metrics():  # none yet if the run is stopped before its first
        save_curves(folder.loss_picture, rows, folder.read_validations())

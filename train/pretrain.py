"""Pre-training, from its configuration to its last step."""

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.models.config import NT_XENT
from peclr_dali.models.equivariance import build_undo
from peclr_dali.models.network import ContrastiveNetwork, build_network, health
from peclr_dali.models.nt_xent import NTXent, loss_at_chance
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.order import rows_per_batch
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.interrupt import StopSignals
from peclr_dali.train.distributed.world import World, on_all_ranks
from peclr_dali.train.probe import ProbeValidator
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpointer import Checkpointer, resume_or_claim
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.meter import Meter
from peclr_dali.train.runs.pictures import save_loss
from peclr_dali.train.runs.run import load_batches, load_images, started_run
from peclr_dali.train.steps.embed import ViewEmbedder
from peclr_dali.train.steps.exact import ExactStep, StepResult
from peclr_dali.train.steps.optim import build_optimizer
from peclr_dali.train.steps.step_graph import StepGraph
from peclr_dali.train.steps.train_state import TrainState, autocast_dtype, build_state, on_device
from peclr_dali.train.trainer import check_first_step, train

log = logging.getLogger(__name__)

VIEWS = 2

Loss = Callable[[Tensor], Tensor]
"""A function of the embeddings (2, N, D) of the whole batch, both views of each sample; it returns a scalar."""


def pretrain(config: Config, resume: Resume = "never", loss: Loss | None = None, *, check: bool = False) -> RunFolder:
    """Pre-train an encoder as configured. Under torchrun, every rank calls this.

    Args:
        loss: takes the place of NT-Xent. `loss.name` becomes the function's name or the object's `repr`, so a run is
            not continued with a loss of another name or other settings. A warning tells where these do not show the
            settings.
        check: end before the first update of the weights, and write nothing: `check_first_step`.

    Returns:
        The folder with metrics, pictures and checkpoints.

    Raises:
        UserError: the input cannot be used, `loss.name` is that of a loss that is not given, or the loss of a step is
            not finite.
        Interrupted: a signal of `StopSignals` came; the state is saved.
    """
    with started_run(with_loss_name(config, loss), resume, check=check) as run:
        config, world = run.config, run.world
        index, steps_per_epoch = load_images(run)

        with on_all_ranks(world):
            network = on_device(build_network(run.encoder, config.projector, config.geometry.side_px), config, world)
            state = build_state(config, network, pretraining_optimizer(config, network), steps_per_epoch)
            exact = build_step(config, network, state, world, loss)
        step = StepGraph(exact) if is_recorded(config, world) else exact

        bad_files = BadFiles(run, index)
        if not resume_or_claim(run, index, state, bad_files):
            return run.folder

        loader = load_batches(run, index, state, bad_files.quarantine, views=VIEWS)
        if index.sources:
            rows = rows_per_batch([source.weight for source in index.sources], config.train.batch)
            parts = [f"{count} of {part.name} ({part.count})" for count, part in zip(rows, index.sources, strict=True)]
            log.info("rows of every batch: %s", ", ".join(parts))
        validator = ProbeValidator(config, index, network, state, world)
        if check:
            check_first_step(run, state, step, loader)
            return run.folder
        with (
            loader,
            StopSignals(alone=world.world_size == 1) as stop,
            Checkpointer(run, index, state, bad_files, draw=draw_loss) as checkpointer,
            Meter(run, state, checkpointer, exact.own_work, embedding_health, "pre-training") as meter,
        ):
            train(run, index, state, step, loader, validator, checkpointer, bad_files, meter, stop)
    return run.folder


def with_loss_name(config: Config, loss: Loss | None) -> Config:
    """The configuration with the name of the loss that takes the place of NT-Xent, if there is one."""
    if loss is not None:
        if not has_recorded_settings(loss):
            log.warning(
                "settings of the loss %s are not recorded, so a resumed run does not notice other ones: give it a "
                "__repr__ that shows them, as a dataclass has",
                loss,
            )
        name = getattr(loss, "__name__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(loss))
        return replace(config, loss=replace(config.loss, name=name))
    if config.loss.name != NT_XENT:
        raise UserError(f"loss.name = {config.loss.name!r}: expected {NT_XENT!r}; `pretrain` of Python takes others")
    return config


def has_recorded_settings(loss: Loss) -> bool:
    """Whether the name or `repr` of a loss shows its settings.

    It does not for closures, methods, partials, and objects or modules without a `__repr__` or `extra_repr` of their
    own, or of a class that has more settings than the one whose `__repr__` it inherits.
    """
    if getattr(loss, "__closure__", None) or hasattr(loss, "__self__") or isinstance(loss, functools.partial):
        return False
    shows = "extra_repr" if isinstance(loss, nn.Module) else "__repr__"
    first = next(kind for kind in type(loss).__mro__ if "__init__" in vars(kind) or shows in vars(kind))
    return shows in vars(first) and first not in (object, nn.Module)


def pretraining_optimizer(config: Config, network: ContrastiveNetwork) -> torch.optim.Optimizer:
    """LARS around Adam, or AdamW."""
    undecayed = {f"encoder.{network.encoder.inner}.{name}" for name in network.encoder.undecayed()}
    return build_optimizer(config.optim, network.named_parameters(), config.train.batch, undecayed)


def build_step(
    config: Config, network: ContrastiveNetwork, state: TrainState, world: World, loss: Loss | None = None
) -> ExactStep[Batch]:
    """The exact gradient of the loss of both views, with the latent inverse. By default the loss is NT-Xent."""
    train = config.train
    embed = ViewEmbedder(
        torch.compile(network) if train.compile else network,
        build_undo(config.equivariance, config.geometry.side_px),
        autocast_dtype(config, world),
    )
    return ExactStep(
        network,
        embed,
        loss or NTXent(config.loss.temperature),
        batch=train.batch,
        micro_batch=train.micro_batch,
        recompute=train.recompute,
        reserved_bytes=_bytes_of_batches(config, world),
        spare_graphs=int(is_recorded(config, world)),
        scaler=state.scaler,
        world=world,
    )


def is_recorded(config: Config, world: World) -> bool:
    """Whether steps are recorded, which a CPU cannot do."""
    return config.train.cuda_graph and world.device.type == "cuda"


def embedding_health(result: StepResult) -> dict[str, float]:
    """The health of the embeddings, for a row of metrics."""
    figures = health(result.embeddings)._asdict()
    # The device is waited for once.
    return dict(zip(figures, torch.stack([figure.double() for figure in figures.values()]).tolist(), strict=True))


def draw_loss(folder: RunFolder) -> None:
    """Draw the loss and the rank of the positive."""
    config = folder.read_config()
    chance = loss_at_chance(config.train.batch) if isinstance(config, Config) and config.loss.name == NT_XENT else None
    if rows := folder.read_metrics():  # there are none if the run stops before the first row
        save_loss(folder.loss_picture, rows, chance=chance)


def _bytes_of_batches(config: Config, world: World) -> int:
    """The most that a rank's batches take: those made ahead, one in the making, one in use, and a recorded one."""
    images = len(micro_batch_share(config.train.batch, config.train.micro_batch, world.rank, world.world_size))
    return (config.pipelines.ahead + 2 + is_recorded(config, world)) * images * VIEWS * 3 * config.geometry.side_px**2

"""Pre-training: the trainer's first task."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.models.config import NT_XENT, EncoderConfig
from peclr_dali.models.equivariance import build_undo
from peclr_dali.models.network import ContrastiveNetwork, build_network, health
from peclr_dali.models.nt_xent import NTXent, loss_at_chance
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import rows_per_batch
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.probe import Probe, build_probe
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.pictures import save_loss
from peclr_dali.train.steps.exact import ExactStep, StepResult, embed_views
from peclr_dali.train.steps.optim import build_optimizer
from peclr_dali.train.steps.step_graph import StepGraph
from peclr_dali.train.steps.training_state import compiled
from peclr_dali.train.trainer import Task, Trainer

log = logging.getLogger(__name__)


Loss = Callable[[Tensor], Tensor]
"""A function of the embeddings (2, N, D) of the whole batch, both views of each sample; it returns a scalar."""


def pretrain(config: Config, resume: Resume = "never", loss: Loss | None = None) -> RunFolder:
    """Pre-train an encoder as configured. Under torchrun, every rank calls this. See `Trainer.run`.

    A `loss` takes the place of NT-Xent. `loss.name` becomes the function's name or the object's `repr`, so a run is not
    continued with a loss of another name or other settings. A warning tells where these do not show the settings.

    Raises:
        UserError: as in `Trainer.run`, or `loss.name` is that of a loss that is not given.
    """
    if loss is not None:
        name = getattr(loss, "__name__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(loss))
        config = replace(config, loss=replace(config.loss, name=name))
    elif config.loss.name != NT_XENT:
        raise UserError(f"loss.name = {config.loss.name!r}: expected {NT_XENT!r}; `pretrain` of Python takes others")
    return Trainer(config, resume, partial(Pretraining, loss=loss)).run()


def has_recorded_settings(loss: Loss) -> bool:
    """Whether the name or `repr` of a loss shows its settings.

    It does not for closures, methods, and objects or modules without a `__repr__` or `extra_repr` of their own.
    """
    kind: Any = type(loss)
    shows_nothing = kind.__repr__ is object.__repr__ or getattr(kind, "extra_repr", None) is nn.Module.extra_repr
    return not (shows_nothing or getattr(loss, "__closure__", None) or hasattr(loss, "__self__"))


class Pretraining(Task[ContrastiveNetwork, StepResult]):
    """Pre-training: encoder and projection head, LARS around Adam, the loss. Other arguments as `TrainingState`.

    Args:
        index: the images, for the probe; None: no probe.
        loss: takes the place of NT-Xent.
    """

    title = "pre-training"
    views = 2

    def __init__(
        self,
        config: Config,
        world: World,
        steps_per_epoch: int,
        index: Index | None = None,
        *,
        loss: Loss | None = None,
        fresh: bool,
    ) -> None:
        self.config, self._index = config, index
        self._probe_every = max(1, round(config.probe.every_epochs * steps_per_epoch))
        train = config.train
        super().__init__(config, world, steps_per_epoch, fresh=fresh)
        if loss is not None and not has_recorded_settings(loss):
            log.warning(
                "settings of the loss %s are not recorded, so a resumed run does not notice other ones: give it a "
                "__repr__ that shows them, as a dataclass has",
                config.loss.name,
            )
        recorded = is_recorded(config, world)
        embed = partial(
            embed_views,
            compiled(self.network, train.compile),
            build_undo(config.equivariance, config.geometry.side_px),
            autocast_dtype=self.autocast_dtype,
        )
        self.exact = ExactStep(
            self.network,
            embed,
            loss or NTXent(config.loss.temperature),
            batch=train.batch,
            micro_batch=train.micro_batch,
            recompute=train.recompute,
            reserved_bytes=_bytes_of_batches(config, world),
            spare_graphs=int(recorded),
            scaler=self.scaler,
            world=world,
        )
        self.own_work = self.exact.own_work
        self._graph = StepGraph(self.exact) if recorded else None

    def build_network(self, encoder: EncoderConfig) -> ContrastiveNetwork:
        """Normalisation, encoder and projection head."""
        return build_network(encoder, self.config.projector, self.config.geometry.side_px)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """LARS around Adam, or AdamW."""
        network = self.network
        undecayed = {f"encoder.{network.encoder.inner}.{name}" for name in network.encoder.undecayed()}
        return build_optimizer(self.config.optim, network.named_parameters(), self.config.train.batch, undecayed)

    def gradient(self, batch: Batch) -> StepResult:
        """The exact gradient of the loss."""
        return self._exact_gradient(batch) if self._graph is None else self._graph(self._exact_gradient, batch)

    def _exact_gradient(self, batch: Batch) -> StepResult:
        with self.casts_once():
            return self.exact(batch)

    def figures(self, result: StepResult) -> dict[str, float]:
        """The health of the embeddings."""
        figures = health(result.embeddings)._asdict()
        read = torch.stack([figure.double() for figure in figures.values()]).tolist()  # waits for the device once
        return dict(zip(figures, read, strict=True))

    def log_start(self, index: Index) -> None:
        """Log the sources' rows of a batch if there are several."""
        if index.sources:
            rows = rows_per_batch([source.weight for source in index.sources], self.config.train.batch)
            parts = [f"{count} of {part.name} ({part.count})" for count, part in zip(rows, index.sources, strict=True)]
            log.info("rows of every batch: %s", ", ".join(parts))

    def draw(self, folder: RunFolder) -> None:
        """Draw the loss and the rank of the positive."""
        if rows := folder.read_metrics():  # there are none if the run stops before the first row
            is_nt_xent = self.config.loss.name == NT_XENT
            chance = loss_at_chance(self.config.train.batch) if is_nt_xent else None
            save_loss(folder.loss_picture, rows, chance=chance)

    @cached_property
    def _probe(self) -> Probe | None:
        return None if self._index is None else build_probe(self._index, self.config, self.world)

    @property
    def validation_due(self) -> bool:
        """Whether to probe the encoder: after the first step, every so many epochs, and after the last step."""
        done, on = self.steps_done, self.config.probe.every_epochs > 0
        return on and (done in (1, self.total_steps) or done % self._probe_every == 0)

    def validate(self, folder: RunFolder) -> dict[str, float] | None:
        """Probe the encoder."""
        probe = self._probe
        return None if probe is None else {"step": self.steps_done, **probe.figures(self.network, self.autocast_dtype)}


def is_recorded(config: Config, world: World) -> bool:
    """Whether steps are recorded, which a CPU cannot do."""
    return config.train.cuda_graph and world.device.type == "cuda"


def _bytes_of_batches(config: Config, world: World) -> int:
    """The most that a rank's batches take: those made ahead, one in the making, one in use, and a recorded one."""
    share = micro_batch_share(config.train.batch, config.train.micro_batch, world.rank, world.world_size)
    held = config.pipelines.ahead + 2 + is_recorded(config, world)
    return held * len(share) * Pretraining.views * 3 * config.geometry.side_px**2

"""Fine-tuning to poses, from its configuration to its last step."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from peclr_dali.models.config import PoseConfig
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.distributed.interrupt import StopSignals
from peclr_dali.train.distributed.world import on_all_ranks
from peclr_dali.train.evaluation.errors import evaluation_constants
from peclr_dali.train.pose.labels import PoseLabels, labels_to_learn
from peclr_dali.train.pose.pictures import save_curves, save_predictions
from peclr_dali.train.pose.pose_run import best_of, load_validation, start_pose_network, validate
from peclr_dali.train.pose.pose_step import PoseStep, PoseStepResult
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpointer import Checkpointer, resume_or_claim
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.meter import Meter
from peclr_dali.train.runs.run import Run, load_batches, load_images, started_run
from peclr_dali.train.steps.micro_batches import casts_once
from peclr_dali.train.steps.train_state import TrainState, autocast_dtype, build_state, on_device
from peclr_dali.train.trainer import check_first_step, train

log = logging.getLogger(__name__)

FEW_HANDS = 1000
"""Labelled hands from which on their own statistics serve batch norm as well as those of the starting weights."""


def finetune(config: FinetuneConfig, resume: Resume = "never", *, check: bool = False) -> RunFolder:
    """Fine-tune an encoder to poses as configured. Under torchrun, every rank calls this.

    Args:
        check: end before the first update of the weights, and write nothing: `check_first_step`.

    Returns:
        The folder with metrics, pictures and checkpoints.

    Raises:
        UserError: the input cannot be used, or the loss of a step is not finite.
        Interrupted: a signal of `StopSignals` came; the state is saved.
    """
    with started_run(config, resume, check=check) as run:
        config, world = run.config, run.world
        index, steps_per_epoch = load_images(run)

        with on_all_ranks(world):
            labels, held_out = labels_to_learn(index), load_validation(config)
            labelled = int(labels.keypoints_px.any(axis=(1, 2), where=~np.isnan(labels.keypoints_px)).sum())
            start = start_pose_network(run.encoder, config.pose, config.geometry.side_px)
            start.network.encoder.requires_grad_(not config.train.frozen)
            network = on_device(start.network, config, world)
            learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
            optimizer = torch.optim.Adam(
                learning, lr=config.optim.lr, weight_decay=config.optim.weight_decay, fused=True
            )
            state = build_state(config, network, optimizer, steps_per_epoch)
            gradient = PoseStep(
                network,
                torch.compile(network) if config.train.compile else network,
                config.pose.refine,
                config.loss,
                batch=config.train.batch,
                micro_batch=config.train.micro_batch,
                autocast_dtype=autocast_dtype(config, world),
                scaler=state.scaler,
                world=world,
            )
            step = LabelledStep(gradient, labels, config.pose)
            automatic = config.train.batch_norm == "auto" and start.keeps_head and labelled < FEW_HANDS
            validator = PoseValidator(
                run, network, state, held_out, depth=start.depth or labels.in_metres,
                fixed_statistics=automatic or config.train.batch_norm == "fixed",
                keeps_start=start.keeps_head and config.validation.start_share > 0,
            )  # fmt: skip

        bad_files = BadFiles(run, index)
        if not resume_or_claim(run, index, state, bad_files, validator):
            return run.folder

        loader = load_batches(run, index, state, bad_files.quarantine, views=1)
        encoder = f"{run.encoder.name}{' and head' if start.keeps_head else ''} from {run.checkpoint or start.origin}"
        trained, held_out_count = "frozen" if config.train.frozen else "trained", len(held_out[0]) if held_out else "no"
        log.info("%s encoder %s, %d labelled hands, %s held out", trained, encoder, labelled, held_out_count)
        if validator.fixed_statistics:
            log.info("batch norm's statistics stay those of the starting weights (train.batch_norm)")
        if run.checkpoint is None and config.validation.start_share > 0 and not (start.keeps_head and held_out):
            log.warning(
                "validation.start_share needs a head that was trained, and held-out images: without, it does nothing"
            )
        validator.set_train_mode()
        if check:
            check_first_step(run, state, step, loader)
            return run.folder
        with (
            loader,
            StopSignals(alone=world.world_size == 1) as stop,
            Checkpointer(run, index, state, bad_files, validator, draw=draw_curves) as checkpointer,
            Meter(run, state, checkpointer, gradient.own_work, loss_parts, "fine-tuning") as meter,
        ):
            if start.keeps_head and validator.should_validate(0):
                with meter.paused():
                    row = validator.validate(0)
                meter.log_validation(row)
            train(run, index, state, step, loader, validator, checkpointer, bad_files, meter, stop)
        if validator.best.get("step") == 0:
            log.warning("no validation was better than the starting weights: best/ holds these")
    return run.folder


@dataclass(frozen=True, eq=False)
class LabelledStep:
    """The step of fine-tuning.

    Attributes:
        labels: of all images.
    """

    gradient: PoseStep
    labels: PoseLabels
    pose: PoseConfig

    def __call__(self, batch: Batch) -> PoseStepResult:
        """The result of a step on a batch; the gradients are in the parameters."""
        dtype = next(self.gradient.network.parameters()).dtype
        targets = self.labels.of_view(batch.views[0], batch.samples[:, 0], self.pose, dtype)
        with casts_once(self.gradient.world.device):
            return self.gradient(batch, targets)


class PoseValidator:
    """Measures poses on held-out images, and keeps the best network in a separate checkpoint, with a picture.

    Args:
        held_out: images and their labels; None: there is no validation.
        depth: whether the network has seen 3D labels, or will see them.
        fixed_statistics: as the attribute, for a run that is not resumed.
        keeps_start: whether the network's weights of now have a share in what is validated; also only if not resumed.

    Attributes:
        best: step and metrics of the best validation so far; empty before the first.
        fixed_statistics: whether batch norm keeps its running statistics and uses them in training.
    """

    def __init__(
        self,
        run: Run[FinetuneConfig],
        network: PoseNetwork,
        state: TrainState,
        held_out: tuple[Index, PoseLabels] | None,
        *,
        depth: bool,
        fixed_statistics: bool,
        keeps_start: bool,
    ) -> None:
        self._run, self._network, self._state, self._held_out, self._depth = run, network, state, held_out, depth
        self._every = max(1, round(run.config.validation.every_epochs * (state.total_steps // run.config.train.epochs)))
        known = evaluation_constants(*held_out) if held_out else {}
        constants = {"constant_epe_px": ("mean_keypoints", "epe_px"), "constant_pa_epe_cm": ("rigid_pose", "pa_epe_cm")}
        self._constants = {key: known[of][metric] for key, (of, metric) in constants.items() if of in known}
        self.best: dict[str, Any] = {}
        self.fixed_statistics = fixed_statistics
        self._start = {
            name: tensor.clone()
            for name, tensor in network.state_dict().items()
            if keeps_start and tensor.is_floating_point()
        }

    def set_train_mode(self) -> None:
        """Set train mode; a frozen encoder, and a batch norm with fixed statistics, stay in eval mode."""
        self._network.train()
        if self._run.config.train.frozen:
            self._network.encoder.eval()
        for module in self._network.modules() if self.fixed_statistics else ():
            if isinstance(module, _BatchNorm):
                module.eval()

    def should_validate(self, step: int) -> bool:
        """Before the first step, every `validation.every_epochs` epochs, and after the last step."""
        return self._held_out is not None and (step == self._state.total_steps or step % self._every == 0)

    def validate(self, step: int) -> dict[str, float]:
        """See `trainer.Validator`."""
        assert self._held_out is not None  # else it should not
        index, labels = self._held_out
        config, world = self._run.config, self._run.world
        network = self._with_start()
        figures, poses = validate(network, index, labels, config, world)
        self.set_train_mode()
        row = {"step": step, **figures, **self._constants}
        # The loss is checked at log steps only.
        if (not self.best or best_of([self.best, row]) is row) and self._state.weights_are_finite():
            self.best = row
            with on_all_ranks(world):
                if world.is_main:
                    saved = {"validation": row, "network": network.state_dict(), "depth": self._depth}
                    self._run.folder.best.save(self._state.steps_done, {"config": to_dict(config), **saved})
                    save_predictions(self._run.folder.predictions_picture, poses, labels)
        return row

    def _with_start(self) -> PoseNetwork:
        """The network between its starting weights and the present ones; itself if these count alone."""
        network = copy.deepcopy(self._network) if self._start else self._network
        present = network.state_dict()
        for name, tensor in self._start.items():
            present[name].lerp_(tensor.to(present[name].device), self._run.config.validation.start_share)
        return network

    def state_dict(self) -> dict[str, Any]:
        """The best validation, whether the network has seen 3D labels, what batch norm uses, the weights to keep."""
        return {
            "best": self.best, "depth": self._depth, "fixed_statistics": self.fixed_statistics, "start": self._start,
        }  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the best validation too, if the run still has its network.

        A later validation may have been better and have replaced it, after the checkpoint that is restored; the run
        then removes that network, since its steps are repeated.
        """
        self._depth, self.fixed_statistics = saved["depth"], saved["fixed_statistics"]
        self._start, best = saved["start"], saved["best"]
        self.best = best if best and self._run.folder.best.path_of(best["step"]).exists() else {}


def loss_parts(result: PoseStepResult) -> dict[str, float]:
    """The parts of the loss, for a row of metrics."""
    return dict(zip(result.losses._fields, torch.stack(result.losses).tolist(), strict=True))


def draw_curves(folder: RunFolder) -> None:
    """Draw the losses and the validations."""
    if rows := folder.read_metrics():  # there are none if the run stops before the first row
        save_curves(folder.loss_picture, rows, folder.read_validations())

"""Fine-tuning to poses: the trainer's second task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.pose import PoseNetwork, PoseOutput
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig, FinetuneTrainConfig
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.distributed.all_ranks import on_main
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import evaluation_constants
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels, labels_to_learn
from peclr_dali.train.pose.pictures import save_curves, save_predictions
from peclr_dali.train.pose.pose_run import best_of, load_validation, validate
from peclr_dali.train.pose.pose_step import PoseStep, PoseStepResult
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.starting_weights import start_pose_network
from peclr_dali.train.steps.training_state import compiled
from peclr_dali.train.trainer import Task, Trainer

log = logging.getLogger(__name__)


def finetune(config: FinetuneConfig, resume: Resume = "never") -> RunFolder:
    """Fine-tune an encoder to poses as configured. Under torchrun, every rank calls this. See `Trainer.run`."""
    return Trainer(config, resume, Finetuning).run()


class Finetuning(Task[PoseNetwork, PoseStepResult]):
    """Fine-tuning: a pose network, Adam, L1 losses, metrics on held-out images. Other arguments as `TrainingState`.

    Args:
        index: the labelled images to train on.

    Attributes:
        best: step and metrics of the best validation so far; empty before the first.
    """

    title = "fine-tuning"
    views = 1

    def __init__(
        self, config: FinetuneConfig, world: World, steps_per_epoch: int, index: Index, *, fresh: bool
    ) -> None:
        self.config = config
        self._labels, self._validation = labels_to_learn(index), load_validation(config)
        known = evaluation_constants(*self._validation) if self._validation else {}
        constants = {"constant_epe_px": ("mean_keypoints", "epe_px"), "constant_pa_epe_cm": ("rigid_pose", "pa_epe_cm")}
        self._constants = {key: known[of][metric] for key, (of, metric) in constants.items() if of in known}
        self._validate_every = max(1, round(config.validation.every_epochs * steps_per_epoch))
        super().__init__(config, world, steps_per_epoch, fresh=fresh)
        network, train = self.network, config.train
        self._step = PoseStep(
            network,
            _forward_of(network, train),
            config.pose.refine,
            config.loss,
            batch=train.batch,
            micro_batch=train.micro_batch,
            autocast_dtype=self.autocast_dtype,
            scaler=self.scaler,
            world=world,
        )
        self.own_work = self._step.own_work
        self.best: dict[str, Any] = {}
        self._train_mode()

    def build_network(self, encoder: EncoderConfig) -> PoseNetwork:
        """The encoder, which may be frozen, and the head."""
        start = start_pose_network(encoder, self.config.pose, self.config.geometry.side_px)
        self._depth = start.depth or self._labels.in_metres
        self._start = f"{encoder.name}{' and head' if start.keeps_head else ''} from {start.origin}"
        start.network.encoder.requires_grad_(not self.config.train.frozen)
        return start.network

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Adam for the parameters that are not frozen."""
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        optim = self.config.optim
        return torch.optim.Adam(trained, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)

    def gradient(self, batch: Batch) -> PoseStepResult:
        """The gradient of the L1 losses."""
        samples = batch.samples[:, 0]
        targets = self._labels.of_view(batch.views[0], samples, self.config.pose, self.dtype)
        with self.casts_once():
            return self._step(batch, targets)

    def figures(self, result: PoseStepResult) -> dict[str, float]:
        """The parts of the loss."""
        return dict(zip(result.losses._fields, torch.stack(result.losses).tolist(), strict=True))

    def log_start(self, index: Index) -> None:
        """Log the starting weights and the numbers of labelled and held-out images."""
        labelled = int(self._labels.keypoints_px.any(axis=(1, 2), where=~np.isnan(self._labels.keypoints_px)).sum())
        held_out = len(self._validation[0]) if self._validation is not None else "no"
        trained = "frozen" if self.config.train.frozen else "trained"
        log.info("%s encoder %s, %d images with labels, %s held out", trained, self._start, labelled, held_out)

    def draw(self, folder: RunFolder) -> None:
        """Draw the losses and the validations."""
        if rows := folder.read_metrics():  # there are none if the run stops before the first row
            save_curves(folder.loss_picture, rows, folder.read_validations())

    @property
    def validation_due(self) -> bool:
        """Whether to validate: every `validation.every_epochs` epochs, and after the last step."""
        done = self.steps_done
        return self._validation is not None and (done == self.total_steps or done % self._validate_every == 0)

    def validate(self, folder: RunFolder) -> dict[str, float] | None:
        """Measure on held-out images. The best network so far is kept in a separate checkpoint, with a picture."""
        assert self._validation is not None  # else none is due
        index, labels = self._validation
        figures, poses = validate(self.network, index, labels, self.config, self.world)
        self._train_mode()
        row = {"step": self.steps_done, **figures, **self._constants}
        better = not self.best or best_of([self.best, row]) is row
        if better and self.weights_are_finite():  # the loss is checked at log steps only
            self.best = row
            on_main(self.world, lambda: self._keep_best(folder, poses, labels))
        return row

    def _keep_best(self, folder: RunFolder, poses: Poses, labels: PoseLabels) -> None:
        saved = {
            "config": to_dict(self.config), "validation": self.best, "network": self.network.state_dict(),
            "depth": self._depth,
        }  # fmt: skip
        folder.best.save(self.steps_done, saved)
        save_predictions(folder.predictions_picture, poses, labels)

    def _train_mode(self) -> None:
        """Set train mode, also after a validation; a frozen encoder stays in eval mode."""
        self.network.train()
        if self.config.train.frozen:
            self.network.encoder.eval()

    def state_dict(self) -> dict[str, Any]:
        """Add the best validation, and whether the network has seen 3D labels."""
        return {**super().state_dict(), "best": self.best, "depth": self._depth}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the best validation too, if the run still has its network.

        A later validation may have been better and have replaced it, after the checkpoint that is restored; the run
        then removes that network, since its steps are repeated.
        """
        super().load_state_dict(saved)
        self._depth = saved["depth"]
        kept = RunFolder(Path(self.config.run.out), keep=self.config.run.keep).best
        self.best = saved["best"] if saved["best"] and kept.path_of(saved["best"]["step"]).exists() else {}


def _forward_of(network: PoseNetwork, train: FinetuneTrainConfig) -> Callable[[Tensor, Tensor], PoseOutput]:
    """The forward pass of a step. A frozen encoder needs no graph."""
    if not train.frozen:
        return compiled(network, train.compile)
    features_of = compiled(network.features, train.compile)

    def forward(image: Tensor, intrinsics: Tensor) -> PoseOutput:
        with torch.no_grad():
            features = features_of(image)
        return network.from_features(features, intrinsics, side_px=image.shape[-1])

    return forward

"""Loads a fine-tuned network with its configuration, and validates it on held-out images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import load_strictly
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pose.inference import Floats, Poses, estimate_poses
from peclr_dali.train.pose.labels import PoseLabels, errors_of, labels_to_learn
from peclr_dali.train.pose.metrics import metric_of
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint


@dataclasses.dataclass(frozen=True)
class PoseRun:
    """A fine-tuned network and its configuration.

    Attributes:
        path: path of the checkpoint.
        step: number of optimiser steps.
        config: configuration of the run, with `train.precision = "auto"`: the run's is that of its training.
        network: the network, in eval mode and float32.
        depth: whether it was trained with 3D labels, and so predicts depths.
    """

    path: Path
    step: int
    config: FinetuneConfig
    network: PoseNetwork
    depth: bool

    @property
    def box_margin(self) -> float:
        """Factor of the box's side in training."""
        return self.config.data[0].box_margin


def load_pose_run(source: Path, device: torch.device | None = None) -> PoseRun:
    """Read a fine-tuned network.

    Args:
        source: a checkpoint, or a run's folder: its best checkpoint on validation, or the newest if there was no
            validation.
        device: device of the network; by default the CPU.

    Raises:
        UserError: there is no checkpoint, it cannot be read, or it is not from fine-tuning.
    """
    expected = "the folder of a fine-tuning run, with best/ or checkpoints/ in it, or a checkpoint"
    path = find_checkpoint(source, expected)
    saved = load_checkpoint(path)
    if "pose" not in saved["config"]:
        raise UserError(
            f"{path} is from pre-training and predicts no poses: fine-tune it first, with "
            f"'python cli.py finetune --from {path.parent.parent if path.parent.name == 'checkpoints' else path}'"
        )
    try:
        config: FinetuneConfig = TypeAdapter(FinetuneConfig).validate_python(saved["config"])
    except ValidationError as error:
        raise UserError(f"{path} was written by another version: {in_one_line(error)}") from error
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="auto"))
    network = PoseNetwork(make_encoder(config.encoder.name, config.geometry.side_px), config.pose)
    load_strictly(network, saved["network"], origin=str(path), model="its configuration")
    place = device or torch.device("cpu")
    return PoseRun(path, saved["step"], config, network.float().to(place).eval(), saved.get("depth", True))


def require_finite(path: Path, keypoints_px: Floats) -> None:
    """Raise a `UserError` if a checkpoint's network, of finite weights, gives keypoints that are not finite."""
    if not np.isfinite(keypoints_px).all():
        raise UserError(f"{path}: gives keypoints that are NaN or infinite; use another checkpoint")


SHOWN = 12
"""Number of poses in predictions.png."""


def load_validation(config: FinetuneConfig) -> tuple[Index, PoseLabels] | None:
    """The validation split of the training sources and its labels; None if the run holds out no images."""
    if config.validation.every_epochs == 0 or any(source.split != "train" for source in config.data):
        return None
    index = load_index([dataclasses.replace(source, split="val", label_fraction=1.0) for source in config.data])
    return index, labels_to_learn(index)


def validate(
    network: PoseNetwork, index: Index, labels: PoseLabels, config: FinetuneConfig, world: World
) -> tuple[dict[str, float], Poses]:
    """Compute the network's metrics. It is set to eval mode and left there. All ranks get the same result.

    Returns:
        The metrics: EPE and PA-EPE in cm, AUC and PA-AUC, 2D EPE in pixels of the source; NaN if not measurable, as in
        3D for labels without depth. And the poses. A substitute is measured in place of an unreadable image.
    """
    poses = estimate_poses(network, index, labels.intrinsics, config, world, keep_images=SHOWN)
    errors = errors_of(poses, labels[poses.samples])
    figures = dict.fromkeys(("epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"), math.nan)
    return figures | {name: metric_of(table) for name, table in errors.tables.items() if name in figures}, poses


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The row with the smallest PA-EPE, or the smallest 2D EPE if there is no PA-EPE. The first one wins ties."""
    name = "epe_px" if all(math.isnan(row["pa_epe_cm"]) for row in rows) else "pa_epe_cm"
    measured = [row for row in rows if not math.isnan(row.get(name, math.nan))]
    return min(measured, key=itemgetter(name)) if measured else rows[0]

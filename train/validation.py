"""The metrics of a pose network on held-out images, while it trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.pose import PoseNetwork
from pipelines.index import Index
from pipelines.sources import DataConfig, load_index
from train.distributed import World
from train.finetune_config import FinetuneConfig
from train.metrics import pixel_metrics, pose_metrics
from train.pose_inference import Poses, estimate_poses
from train.pose_targets import PoseLabels
from train.state import PRECISIONS, resolve_precision

SHOWN = 12
"""Hands in the picture of predictions."""


@dataclass(frozen=True)
class Validation:
    """Held-out images and what is known about them.

    Attributes:
        index: the images.
        labels: their hands.
    """

    index: Index
    labels: PoseLabels


def load_validation(config: FinetuneConfig) -> Validation | None:
    """The validation split of the sources that are trained on; None if the run holds nothing out.

    Raises:
        UserError: the split cannot be read.
    """
    sources: tuple[DataConfig, ...] = config.data if isinstance(config.data, tuple) else (config.data,)
    if config.validation.every_epochs == 0 or any(source.split != "train" for source in sources):
        return None
    index = load_index([dataclasses.replace(source, split="val", label_fraction=1.0) for source in sources])
    return Validation(index, PoseLabels(index, config.pose))


def validate(
    network: PoseNetwork, validation: Validation, config: FinetuneConfig, world: World
) -> tuple[dict[str, Any], Poses]:
    """Metrics of the network in eval mode, in which it is left; the same on all ranks.

    Returns:
        EPE and PA-EPE in cm, AUC and PA-AUC, 2D EPE in pixels of the source; and the poses.
    """
    dtype, autocast_dtype = PRECISIONS[resolve_precision(config.train.precision, world.device)]
    poses = estimate_poses(
        network,
        validation.index,
        validation.index.targets["K"],
        config.geometry,
        config.pipelines,
        batch=config.validation.batch,
        world=world,
        dtype=dtype,
        autocast_dtype=autocast_dtype,
        keep_images=SHOWN,
    )
    labels, samples = validation.labels, poses.samples
    true_m = labels.joints_m[samples]
    scale_m = labels.scale_m[samples].astype(np.float64)
    known = np.isfinite(true_m).all(axis=2) & np.isfinite(scale_m)[:, None]
    predicted_m = poses.joints * scale_m[:, None, None]
    metrics = pose_metrics(predicted_m, true_m, valid=known & np.isfinite(predicted_m).all(axis=2))
    assert validation.index.keypoints_px is not None
    true_px = validation.index.keypoints_px[samples]
    seen = np.isfinite(true_px).all(axis=2) & np.isfinite(poses.keypoints_px).all(axis=2)
    figures: dict[str, Any] = {name: float(metrics[name]) for name in ("epe_cm", "auc", "pa_epe_cm", "pa_auc")}
    return {**figures, "epe_px": pixel_metrics(poses.keypoints_px, true_px, valid=seen)["epe_px"]}, poses

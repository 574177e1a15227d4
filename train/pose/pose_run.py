"""Loads pose networks, fine-tuned or with the weights that fine-tuning starts from, and validates them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import load_strictly
from peclr_dali.parsing import or_shipped
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pose.inference import Poses, estimate_poses
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


def load_pose_run(source: Path, device: torch.device | str = "cpu") -> PoseRun:
    """Read a fine-tuned network.

    Args:
        source: a checkpoint, or a run's folder: its best checkpoint on validation, or the newest if there was no
            validation.
        device: device of the network.

    Raises:
        UserError: there is no checkpoint, it cannot be read, or it is not from fine-tuning.
    """
    path = find_checkpoint(source, "the folder of a fine-tuning run, with best/ or checkpoints/ in it, or a checkpoint")
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
    return PoseRun(path, saved["step"], config, network.float().to(device).eval(), saved.get("depth", True))


class Start(NamedTuple):
    """A network with its starting weights.

    Attributes:
        origin: what the weights were read from; "random" or "imagenet" if that is no file.
        keeps_head: whether the head's weights are those of a fine-tuned network; else they are random.
        depth: whether that head was trained with 3D labels.
    """

    network: PoseNetwork
    origin: str
    keeps_head: bool = False
    depth: bool = False


def start_pose_network(encoder: EncoderConfig, pose: PoseConfig, side_px: int | None = None) -> Start:
    """Build the network of a configuration with its starting weights; of the head see `PoseConfig.weights`.

    `encoder.weights` may also be a checkpoint, the name of a shipped network, or a run's folder: its best checkpoint on
    validation, or the newest if there was no validation. Weights that cannot be read or do not fit are a `UserError`.
    """
    path = or_shipped(Path(encoder.weights), ".safetensors")
    encoder = dataclasses.replace(encoder, weights=str(path))
    try:
        saved = load_checkpoint(
            find_checkpoint(path, "encoder.weights to be the folder of a run, or a file of weights")
        )
    except UserError:  # no checkpoint of this project
        if path.is_dir():
            raise
        return Start(PoseNetwork(build_encoder(encoder, side_px), pose), encoder.weights)
    name = saved["config"]["encoder"]["name"]
    if name != encoder.name:
        raise UserError(
            f"encoder.weights: {path} holds a {name}, and encoder.name = {encoder.name!r}: set encoder.name = {name!r}"
        )
    network = PoseNetwork(make_encoder(name, side_px), pose)
    network.encoder.load_weights(saved["network"], encoder.weights, name)
    # Of pre-training, with another head, or pose.weights = "random".
    if {**saved["config"].get("pose", {}), "weights": "auto"} != dataclasses.asdict(pose):
        return Start(network, encoder.weights)
    load_strictly(network, saved["network"], origin=encoder.weights, model="its configuration")
    return Start(network, encoder.weights, keeps_head=True, depth=saved.get("depth", True))


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
    poses = estimate_poses(network, index, labels.intrinsics, config, world, keep_images=12)  # for predictions.png
    errors = errors_of(poses, labels[poses.samples])
    figures = dict.fromkeys(("epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"), math.nan)
    return figures | {name: metric_of(table) for name, table in errors.tables.items() if name in figures}, poses


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The row with the smallest PA-EPE, or the smallest 2D EPE if there is no PA-EPE. The first one wins ties."""
    name = "epe_px" if all(math.isnan(row["pa_epe_cm"]) for row in rows) else "pa_epe_cm"
    measured = [row for row in rows if not math.isnan(row.get(name, math.nan))]
    return min(measured, key=itemgetter(name)) if measured else rows[0]

"""Loads the weights that fine-tuning starts from: of a run, a checkpoint, a shipped network or a file of weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import load_strictly
from peclr_dali.parsing import or_shipped
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint


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
    its_head = {**saved["config"].get("pose", {}), "weights": "auto"}
    if its_head != dataclasses.asdict(pose):  # of pre-training, another head, or pose.weights = "random"
        return Start(network, encoder.weights)
    load_strictly(network, saved["network"], origin=encoder.weights, model="its configuration")
    return Start(network, encoder.weights, keeps_head=True, depth=saved.get("depth", True))

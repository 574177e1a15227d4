"""Loads starting weights from a run or a checkpoint of this project; models/encoders.py loads all other weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from pydantic import TypeAdapter, ValidationError

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, PoseConfig, require_weights
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import encoder_state
from peclr_dali.shipped import or_shipped
from peclr_dali.train.pose.pose_run import load_tensors
from peclr_dali.train.runs.checkpoint import METADATA_KEY, find_checkpoint, load_checkpoint


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
    encoder = dataclasses.replace(encoder, weights=str(or_shipped(Path(encoder.weights), ".safetensors")))
    saved = _run_of(encoder)
    if saved is None:
        return Start(PoseNetwork(build_encoder(encoder, side_px), pose), encoder.weights)
    network = PoseNetwork(make_encoder(encoder.name, side_px), pose)
    network.encoder.load_library_state(encoder_state(saved["network"]), encoder.weights, encoder.name)
    if pose.weights == "random" or not _same_head(saved["config"], pose):
        return Start(network, encoder.weights)
    load_tensors(network, saved["network"], Path(encoder.weights))
    return Start(network, encoder.weights, keeps_head=True, depth=saved.get("depth", True))


def _same_head(config: dict[str, Any], pose: PoseConfig) -> bool:
    """Whether a checkpoint's configuration is of fine-tuning, with this head."""
    try:
        of_run = TypeAdapter(PoseConfig).validate_python(config["pose"])
    except (KeyError, ValidationError):  # of pre-training, or of another version
        return False
    return dataclasses.replace(of_run, weights=pose.weights) == pose


def _run_of(encoder: EncoderConfig) -> dict[str, Any] | None:
    """The checkpoint that `encoder.weights` names; None if it names no run of this project."""
    if encoder.weights in ("random", "imagenet"):
        return None
    require_weights(encoder.weights)
    path = Path(encoder.weights)
    if path.is_dir():
        path = find_checkpoint(path, "encoder.weights to be the folder of a run, a checkpoint or a file of weights")
    elif not _is_checkpoint(path):
        return None
    saved = load_checkpoint(path)
    name = saved["config"]["encoder"]["name"]
    if name != encoder.name:
        raise UserError(
            f"encoder.weights: {path} holds a {name}, and encoder.name = {encoder.name!r}: "
            f"set encoder.name = {name!r}, or start from another run"
        )
    return saved


def _is_checkpoint(path: Path) -> bool:
    """Whether a file looks like a checkpoint of this project, not a bare state dict; False for unreadable files."""
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                return METADATA_KEY in (file.metadata() or {})
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # reading it as a state dict later gives the error message
        return False
    return isinstance(content, dict) and {"format", "config", "network"} <= content.keys()

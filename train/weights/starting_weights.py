"""Loads encoder weights from a run or a checkpoint of this project; models/encoders.py loads all other weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, PoseConfig, require_weights
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import encoder_state
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint


def start_pose_network(encoder: EncoderConfig, pose: PoseConfig, side_px: int | None = None) -> PoseNetwork:
    """Build the network of a configuration with its starting weights; the head's are random.

    `encoder.weights` may also be a checkpoint, or a run's folder: its best checkpoint on validation, or the newest if
    there was no validation. Weights that cannot be read or do not fit are a `UserError`.
    """
    state = _state_of_run(encoder)
    if state is None:
        return PoseNetwork(build_encoder(encoder, side_px), pose)
    network = PoseNetwork(make_encoder(encoder.name, side_px), pose)
    network.encoder.load_library_state(state, encoder.weights, encoder.name)
    return network


def _state_of_run(encoder: EncoderConfig) -> dict[str, Tensor] | None:
    """The encoder's tensors in a run of this project, by its library's names; None if `encoder.weights` is no run."""
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
    return encoder_state(saved["network"])


def _is_checkpoint(path: Path) -> bool:
    """Whether a file looks like a checkpoint of this project, not a bare state dict; False for unreadable files."""
    try:
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # reading it as a state dict later gives the error message
        return False
    return isinstance(content, dict) and {"format", "config", "network"} <= content.keys()

"""Weights of other origins: converts those of PeCLR's authors, and loads those that a run starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from pydantic import TypeAdapter

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models import weights
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import is_safetensors, load_strictly
from peclr_dali.parsing import or_shipped
from peclr_dali.train.runs.checkpoint import METADATA_KEY, find_checkpoint, load_checkpoint, write_checkpoint
from peclr_dali.train.weights.export import require_ending, save_tensors
from peclr_dali.writing import refuse_inputs


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
    if encoder.weights in ("random", "imagenet") or not (path.is_dir() or _is_checkpoint(path)):
        return Start(PoseNetwork(build_encoder(encoder, side_px), pose), encoder.weights)
    saved = load_checkpoint(find_checkpoint(path, "encoder.weights to be the folder of a run, or a file of weights"))
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


def _is_checkpoint(path: Path) -> bool:
    """Whether a file looks like a checkpoint of this project, not a bare state dict; False for unreadable files."""
    try:
        if is_safetensors(path):
            with safetensors.safe_open(path, framework="pt") as file:
                return METADATA_KEY in (file.metadata() or {})
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # reading it as a state dict later gives the error message
        return False
    return isinstance(content, dict) and {"format", "config", "network"} <= content.keys()


_EXPECTED = "published weights, or a checkpoint of the authors' pre-training"


def convert(source: Path, out: Path) -> str:
    """Convert weights of the authors.

    An encoder (published, or in a Lightning checkpoint) becomes a file for `encoder.weights`, of a name that ends in
    .pth or .safetensors. A published pose network becomes a checkpoint, .pth, that `evaluate`, `predict` and `export`
    take as a run. Returns a line about the written file.

    Raises:
        UserError: `source` is of another kind or does not fit, or `out` is `source` or cannot be written.
    """
    require_ending(out, ".pth", ".safetensors")
    refuse_inputs(out, [source])
    state = weights.with_named_children(weights.read_weights(source, key="SOURCE", expected=_EXPECTED))
    name = weights.resnet_name(state)
    if name is None:
        first = next(iter(state), "nothing")
        raise UserError(f"{source} holds no known ResNet (its first tensor is {first}): expected {_EXPECTED}")
    encoder = make_encoder(name)
    if not any("zroot_ref." in key for key in state):
        encoder.load_weights(state, str(source), name)
        save_tensors(encoder.library_state_dict(), out, {})
        return f"{out}: {name}, torchvision's names, without fc; for encoder.weights"
    require_ending(out, ".pth")
    state = weights.encoder_state(state, ["backend_model.conv1.weight"], str(source))  # all of it, without a prefix
    pose = PoseConfig(first_keypoint="palm")
    network = PoseNetwork(encoder, pose)
    model = f"the authors' pose network on a {name}"
    try:
        weights.load_strictly(network, weights.pose_from_published(state), origin=str(source), model=model)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{source} does not fit {model}: {in_one_line(error)}. Download it again") from error
    config = {
        "encoder": {"name": name, "weights": "random"},
        "pose": TypeAdapter(PoseConfig).dump_python(pose, mode="json"),
        "geometry": {"side_px": weights.PUBLISHED_SIDE_PX},
        "data": {"box": "joints", "box_margin": 1 / 0.7},  # the keypoints' rectangle has 0.7 of the view's side
    }
    write_checkpoint(out, 0, {"config": config, "network": network.state_dict()})
    return f"{out}: pose network on a {name}, its keypoints in FreiHAND's order"

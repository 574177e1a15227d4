"""Converts weights of PeCLR's authors to this project's format."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line
from peclr_dali.models import weights
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.train.runs.checkpoint import write_checkpoint
from peclr_dali.train.weights.export import require_ending, save_tensors
from peclr_dali.writing import refuse_inputs

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

"""Converts weights between this project's format and those of the authors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from peclr_dali.errors import UserError
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import (
    PUBLISHED_SIDE_PX,
    State,
    check_state,
    encoder_state,
    naming,
    pose_from_published,
    pose_to_published,
    read_weights,
    resnet_name,
)
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint, write_checkpoint
from peclr_dali.train.weights.export import require_ending, save_tensors
from peclr_dali.writing import refuse_inputs

Target = Literal["ours", "published"]

PUBLISHED_POSE = PoseConfig(first_keypoint="palm")

_EXPECTED = "published weights, a checkpoint of the authors' pre-training, or a run of this project"


def convert(source: Path, out: Path, to: Target) -> str:
    """Convert the weights of `source` to another format.

    - "ours": an encoder (published, or from a Lightning checkpoint) becomes a file for `encoder.weights`; a published
      pose network becomes a checkpoint that `evaluate`, `predict` and `export` take as a run.
    - "published": an encoder in torchvision's names under "state_dict", with an `fc` of zeros, which the authors'
      loading code needs but does not use; a pose network for their `RN_25D_wMLPref`.

    `source` may also be a run's folder. `out` ends in .pth. The file of an encoder in our format may end in
    .safetensors.

    Returns:
        A line about the written file.

    Raises:
        UserError: `source` is of another kind or does not fit, or `out` is `source` or cannot be written.
    """
    path = find_checkpoint(source, _EXPECTED)
    require_ending(out, ".pth", *([".safetensors"] if to == "ours" else []))
    refuse_inputs(out, [path])
    state = read_weights(path, key="SOURCE", expected=_EXPECTED)
    found = naming(state)
    if to == "published":
        is_pose = "head.weight" in state or "head.0.weight" in state
        return _pose_to_published(state, path, out) if is_pose else _encoder_to_published(state, path, out)
    if found in ("ours", "ours_no_resnet"):
        raise UserError(
            f"{path} is a checkpoint of this project already; `export` writes its encoder, --to published converts it"
        )
    if found == "pose_published":
        if out.suffix != ".pth":
            raise UserError(f"{out}: a pose network comes with its configuration; expected a name that ends in .pth")
        network, config = _published_pose(state, path)
        write_checkpoint(out, 0, {"config": config, "network": network})
        return f"{out}: pose network on a {config['encoder']['name']}, its keypoints in FreiHAND's order"
    encoder, name = _checked_encoder(state, path)
    save_tensors({key: tensor for key, tensor in encoder.items() if not key.startswith("fc.")}, out, {})
    return f"{out}: {name}, torchvision's names, without fc; for encoder.weights"


def _published_pose(state: State, path: Path) -> tuple[State, dict[str, Any]]:
    """State and configuration of a published pose network, with shapes checked."""
    encoder = resnet_name(encoder_state(state))
    if encoder is None:
        raise UserError(f"{path}: its backend_model is not a known ResNet: expected {_EXPECTED}")
    with torch.device("meta"):  # only shapes, no memory
        built = PoseNetwork(make_encoder(encoder), PUBLISHED_POSE)
        wanted = {f"backend_model.{key}": value for key, value in built.encoder.library_state_dict().items()}
        outputs = 3 * len(built.skeleton) + 1  # the last output is never read
        wanted["backend_model.fc.weight"] = torch.empty(outputs, built.encoder.feature_dim)
        wanted["backend_model.fc.bias"] = torch.empty(outputs)
    wanted |= {f"zroot_ref.{key}": value for key, value in built.get_submodule("refinement").state_dict().items()}
    check_state(
        state, wanted, origin=str(path), model=f"the authors' pose network on a {encoder}",
        remedy="expected their published file as it is; download it again.",
    )  # fmt: skip
    config = {
        "encoder": {"name": encoder, "weights": "random"},
        "pose": TypeAdapter(PoseConfig).dump_python(PUBLISHED_POSE, mode="json"),
        "geometry": {"side_px": PUBLISHED_SIDE_PX},
        "data": {"box": "joints", "box_margin": 1 / 0.7},  # the keypoints' rectangle has 0.7 of the view's side
    }
    return pose_from_published(state), config


def _encoder_to_published(state: State, path: Path, out: Path) -> str:
    encoder, name = _checked_encoder(state, path)
    features = make_encoder(name).feature_dim
    fc = {"fc.weight": torch.zeros(1000, features), "fc.bias": torch.zeros(1000)}
    save_tensors({"state_dict": {**fc, **encoder}}, out, {})
    return f'{out}: {name} in torchvision\'s names under "state_dict", with an fc of zeros'


def _pose_to_published(state: State, path: Path, out: Path) -> str:
    config = load_checkpoint(path)["config"]
    pose, side_px = config["pose"], int(config["geometry"]["side_px"])
    if naming(state) != "ours":
        raise UserError(f"{path}: its encoder is {config['encoder']['name']}; the authors' pose network has a ResNet")
    for key, value in {"features": "pooled", "head": "linear", "refine": True, "root": "wrist"}.items():
        if pose.get(key, value) != value:
            raise UserError(
                f"{path}: pose.{key} = {pose[key]!r}; the authors' pose network has {value!r} only, so this one "
                "cannot be written in their format"
            )
    save_tensors({"state_dict": pose_to_published(state, side_px=side_px)}, out, {})
    notes = []
    if pose["first_keypoint"] != "palm":
        notes.append("keypoint 0 is the wrist, so leave out the step from palm to wrist in the authors' code")
    if side_px != PUBLISHED_SIDE_PX:
        notes.append(f"it was trained on views of {side_px} pixels, the authors' networks on {PUBLISHED_SIDE_PX}")
    return f"{out}: the authors' pose network on a {config['encoder']['name']}" + "".join(f"; {note}" for note in notes)


def _checked_encoder(state: State, path: Path) -> tuple[State, str]:
    encoder = encoder_state(state)
    name = resnet_name(encoder)
    if name is None:
        first = next(iter(state), "nothing")
        raise UserError(f"{path} holds no known ResNet (its first tensor is {first}): expected {_EXPECTED}")
    with torch.device("meta"):
        wanted = make_encoder(name).library_state_dict()
    check_state(
        encoder, wanted, origin=str(path), model=f"torchvision's {name}",
        remedy=f"expected {_EXPECTED}.", ignored=lambda key: key.startswith("fc."),
    )  # fmt: skip
    return encoder, name

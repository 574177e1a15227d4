"""The `convert` command: pose networks of PeCLR's authors as checkpoints of this project."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import State, encoder_state, load_strictly, read_weights, with_named_children
from peclr_dali.skeleton import HAND, hand_rows
from peclr_dali.train.runs.checkpoint import write_checkpoint
from peclr_dali.writing import require_ending

PUBLISHED_SIDE_PX = 224
"""Side of the views of the authors' pose networks; their 2D keypoints are in pixels of such a view."""
_EXPECTED = "a published pose network of PeCLR"


def convert(source: Path, out: Path) -> str:
    """Convert a pose network of the authors to a checkpoint that `evaluate`, `predict` and `export` take as a run.

    Their encoders need no conversion: `encoder.weights` reads them. Returns a line about the written file.

    Raises:
        UserError: `source` is of another kind or does not fit, or `out` does not end in .pth.
    """
    require_ending(out, ".pth")
    state = with_named_children(read_weights(source, key="SOURCE", expected=_EXPECTED))
    # Names of torchvision behind any prefix; the number of residual blocks tells the ResNet.
    blocks = {match[0] for match in (re.search(r"\blayer\d\.\d+\.", key) for key in state) if match}
    is_deep = any(key.endswith("layer1.0.conv3.weight") for key in state)
    names = {16: "resnet50", 33: "resnet101", 50: "resnet152"} if is_deep else {8: "resnet18", 16: "resnet34"}
    name = names.get(len(blocks))
    if name is None or not any("zroot_ref." in key for key in state):
        found = f"a {name}, which encoder.weights reads as it is" if name else next(iter(state), "nothing")
        raise UserError(f"{source} holds {found}: expected {_EXPECTED}")
    state = encoder_state(state, ["backend_model.conv1.weight"], str(source))  # all of it, without a prefix
    pose = PoseConfig(first_keypoint="palm")
    network = PoseNetwork(make_encoder(name), pose)
    model = f"the authors' pose network on a {name}"
    try:
        load_strictly(network, pose_from_published(state), origin=str(source), model=model)
    except (LookupError, RuntimeError) as error:
        raise UserError(f"{source} does not fit {model}: {in_one_line(error)}. Download it again") from error
    config = {
        "encoder": {"name": name, "weights": "random"},
        "pose": TypeAdapter(PoseConfig).dump_python(pose, mode="json"),
        "geometry": {"side_px": PUBLISHED_SIDE_PX},
        "data": {"box": "joints", "box_margin": 1 / 0.7},  # the keypoints' rectangle has 0.7 of the view's side
    }
    write_checkpoint(out, 0, {"config": config, "network": network.state_dict()})
    return f"{out}: pose network on a {name}, its keypoints in FreiHAND's order"


def pose_from_published(state: Mapping[str, Tensor]) -> State:
    """Convert a pose network of the authors to our names, order and units, with the palm as keypoint 0.

    Their last layer gives x and y in pixels of a 224-pixel view. Ours gives them in units of the side, from the centre.
    Theirs has a 64th output, which nothing reads. A missing tensor is a KeyError, another shape a RuntimeError.
    """
    ours = {
        key.replace("backend_model.", "encoder.resnet.").replace("zroot_ref.", "refinement.", 1): tensor
        for key, tensor in state.items()
        if not key.startswith("backend_model.fc.")
    }
    count, rows = len(HAND), hand_rows("peclr", "freihand")
    unit_px, center = torch.tensor([[PUBLISHED_SIDE_PX, PUBLISHED_SIDE_PX, 1], [0.5, 0.5, 0]], dtype=torch.float64)
    weight, bias = (state[f"backend_model.fc.{name}"][:-1].double() for name in ("weight", "bias"))
    ours["head.weight"] = (weight.reshape(count, 3, -1)[rows] / unit_px[:, None]).flatten(0, 1).float()
    ours["head.bias"] = (bias.reshape(count, 3)[rows] / unit_px - center).flatten().float()
    # The refinement reads the depths, x and y of each keypoint, and the root's depth.
    columns = [*rows, *(count + 2 * row + axis for row in rows for axis in (0, 1)), 3 * count]
    first = "refinement.zroot_ref.0.weight"
    return {**ours, first: ours[first][:, columns]}

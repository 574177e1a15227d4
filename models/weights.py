"""Reads files of weights without running their code, and translates the names of their tensors.

Four namings are known: torchvision's ResNets, which include the authors' published encoders; the authors' published
pose networks ("backend_model.", "zroot_ref."); Lightning checkpoints of their pre-training ("encoder.features."); and
ours ("encoder.resnet.", or "encoder.network." of other encoders).
"""

from __future__ import annotations

import pickle
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import safetensors.torch
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.skeleton import HAND, hand_rows

State = dict[str, Tensor]
Naming = Literal["torchvision", "pose_published", "lightning", "ours", "ours_no_resnet"]

PUBLISHED_SIDE_PX: Final = 224
"""Side of the views of the authors' pose networks; their 2D keypoints are in pixels of such a view."""

_PREFIXES: Final[dict[Naming, str]] = {
    "pose_published": "backend_model.",
    "lightning": "encoder.features.",
    "ours": "encoder.resnet.",
    "ours_no_resnet": "encoder.network.",
}
_LIGHTNING: Final = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
"""Name in torchvision's ResNet of the N-th module in "encoder.features.N"."""


class _StandIn:
    """Empty object in the place of one that is no tensor; it ignores its content."""

    def __init__(self, *_: object, **__: object) -> None: ...

    __setstate__ = __setitem__ = __init__


def read_weights(path: Path, *, key: str, expected: str) -> State:
    """Read tensors by name from a file of safetensors or torch.save.

    The tensors are at the top level, under "state_dict" or under "network". No code in the file is run. Lightning's
    checkpoints contain objects of other classes (callbacks, settings), which are left out. A prefix "module."
    (DataParallel) is removed.

    Args:
        key: the option or key that names the file, for messages, such as "encoder.weights".
        expected: the expected content of the file, for messages.

    Raises:
        UserError: the file is missing or unreadable, can only be read by running its code, has no tensors by name, or
            one is not finite.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise UserError(f"{key} = {str(path)!r} {found}: expected {expected}.")
    try:
        content: Any = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else _load_tensors_only(path)
    except MemoryError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for other files
        if tarfile.is_tarfile(path):
            raise UserError(
                f"{key} = {str(path)!r} is an archive: unpack it first, with tar -xf, and name a file in it: expected "
                f"{expected}."
            ) from error
        raise UserError(
            f"{key} = {str(path)!r} cannot be read as a file of tensors only: expected {expected}, "
            "saved by torch.save or safetensors."
        ) from error
    for nested in ("state_dict", "network"):
        if isinstance(content, Mapping) and isinstance(content.get(nested), Mapping):
            content = content[nested]
            break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(
            f"{key} = {str(path)!r} holds no state dict: expected {expected}, its tensors by name "
            'at the top or under "state_dict".'
        )
    state = {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
    require_finite(state, f"{key} = {str(path)!r}")
    return state


def _load_tensors_only(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if any(name.startswith(("torch", "torchvision")) for name in names):
            raise  # a pickled module holds its tensors inside, and a stand-in would drop them
        with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def naming(state: Mapping[str, Tensor]) -> Naming:
    """The naming of a state dict. An unknown one counts as torchvision's, and `check_state` refuses it later."""
    for name, prefix in _PREFIXES.items():
        if any(key.startswith(prefix) for key in state):
            return name
    return "torchvision"


def encoder_state(state: Mapping[str, Tensor]) -> State:
    """The encoder's tensors in its library's names, from any known naming. Other tensors are left out."""
    found = naming(state)
    if found == "torchvision":
        return dict(state)
    prefix = _PREFIXES[found]
    inner = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    if found == "lightning":
        for number, module in enumerate(_LIGHTNING):
            inner = {re.sub(rf"^{number}\b", module, key): tensor for key, tensor in inner.items()}
    return inner


def resnet_name(state: Mapping[str, Tensor]) -> str | None:
    """Name of the ResNet that a state dict in torchvision's names belongs to; None if it belongs to none."""
    blocks = {match[0] for match in (re.match(r"layer\d\.\d+\.", key) for key in state) if match}
    deep = {16: "resnet50", 33: "resnet101", 50: "resnet152"}
    return (deep if "layer1.0.conv3.weight" in state else {8: "resnet18", 16: "resnet34"}).get(len(blocks))


def pose_from_published(state: Mapping[str, Tensor]) -> State:
    """Convert a pose network of the authors to our names, order and units, with the palm as keypoint 0.

    Their last layer gives x and y in pixels of a 224-pixel view. Ours gives them in units of the side, from the centre.
    Theirs has a 64th output, which nothing reads. Shapes are not checked here.
    """
    ours = {f"encoder.resnet.{key}": tensor for key, tensor in encoder_state(state).items() if key[:3] != "fc."}
    rows = hand_rows("peclr", "freihand")
    unit, center = _pixels(PUBLISHED_SIDE_PX)
    weight, bias = state["backend_model.fc.weight"][:-1], state["backend_model.fc.bias"][:-1]
    ours["head.weight"] = (_by_keypoint(weight)[rows] / unit[:, None]).flatten(0, 1).to(weight.dtype)
    ours["head.bias"] = (_by_keypoint(bias)[rows] / unit - center).flatten().to(bias.dtype)
    return ours | _refinement(state, "zroot_ref.", "refinement.", rows)


def pose_to_published(network: Mapping[str, Tensor], *, side_px: int) -> State:
    """The inverse of `pose_from_published`, for a network with a linear head and refinement.

    Args:
        side_px: side of the views that it was trained on. The result's 2D keypoints are in pixels of such a view.
    """
    theirs = {f"backend_model.{key}": tensor for key, tensor in encoder_state(network).items()}
    rows = hand_rows("freihand", "peclr")
    unit, center = _pixels(side_px)
    weight, bias = network["head.weight"], network["head.bias"]
    layer = {
        "weight": (_by_keypoint(weight)[rows] * unit[:, None]).flatten(0, 1).to(weight.dtype),
        "bias": ((_by_keypoint(bias)[rows] + center) * unit).flatten().to(bias.dtype),
    }
    for name, value in layer.items():  # and the 64th output, which nothing reads
        theirs[f"backend_model.fc.{name}"] = torch.cat([value, torch.zeros_like(value[:1])])
    return theirs | _refinement(network, "refinement.", "zroot_ref.", rows)


def _pixels(side_px: int) -> tuple[Tensor, Tensor]:
    """Factors from our units to the authors' for (x, y, depth), and the view's centre in units of its side."""
    return torch.tensor([side_px, side_px, 1], dtype=torch.float64), torch.tensor([0.5, 0.5, 0], dtype=torch.float64)


def _by_keypoint(values: Tensor) -> Tensor:
    """(63, ...) -> (21, 3, ...) in float64, so that a round trip only rounds once."""
    return values.double().reshape(len(HAND), 3, *values.shape[1:])


def _refinement(state: Mapping[str, Tensor], prefix: str, new_prefix: str, rows: list[int]) -> State:
    """Rename the refinement and reorder its inputs: depths, X and Y of each keypoint, the root's depth."""
    count = len(HAND)
    pairs = [count + 2 * row + axis for row in rows for axis in (0, 1)]
    columns = [*rows, *pairs, 3 * count]
    renamed = {new_prefix + key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    first = f"{new_prefix}zroot_ref.0.weight"
    return renamed | {first: renamed[first][:, columns]}


def require_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Check that tensors are finite in float32, in which networks compute.

    Args:
        origin: the file, for messages.

    Raises:
        UserError: a tensor holds NaN or infinity, or is sparse or complex; the message names the first one.
    """
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.is_complex():
            raise UserError(f"{origin}: {name} is a sparse or complex tensor; expected real weights. Name another file")
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise UserError(f"{origin}: {name} holds NaN or infinity; expected finite weights. Name another file")


def check_state(
    state: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    *,
    origin: str,
    model: str,
    remedy: str,
    ignored: Callable[[str], bool] = lambda key: False,
) -> None:
    """Check the names, shapes and kinds of the tensors that were read.

    Args:
        wanted: the expected tensors.
        origin: the file, for messages. `model` is the name of the expected network, `remedy` the end of a message.
        ignored: whether a name that is not in `wanted` is allowed.

    Raises:
        UserError: a name or shape differs, or weights are integers; the message has the first difference.
    """
    problems = [f"{key} is missing" for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    problems += [
        f"{key} is {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in state and state[key].shape != value.shape
    ]
    problems += [
        f"{key} is {str(state[key].dtype).removeprefix('torch.')} instead of floating-point numbers"
        for key, value in wanted.items()
        if key in state and value.is_floating_point() and not state[key].is_floating_point()
    ]
    problems += [f"{key} is unknown" for key in state if key not in wanted and not ignored(key)]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserError(f"{origin} does not fit {model}: {problems[0]}{more}: {remedy}")

"""Files of weights: reading them without running what is in them, and the names that others give to the same tensors.

Known are torchvision's ResNets (the authors' published pre-trained encoders are such), the authors' published pose
networks ("backend_model.", "zroot_ref."), checkpoints of their pre-training code, which uses Lightning
("encoder.features."), and ours ("encoder.resnet.", or "encoder.network." of other encoders).
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from errors import UserError
from skeleton import HAND, hand_rows

State = dict[str, Tensor]
Naming = Literal["torchvision", "pose_published", "lightning", "ours", "ours_no_resnet"]

PUBLISHED_SIDE_PX: Final = 224
"""Side of the views that the authors' pose networks see; their 2D keypoints are in its pixels."""

_PREFIXES: Final[dict[Naming, str]] = {
    "pose_published": "backend_model.",
    "lightning": "encoder.features.",
    "ours": "encoder.resnet.",
    "ours_no_resnet": "encoder.network.",
}
_LIGHTNING: Final = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
"""What the N of "encoder.features.N" is in torchvision's ResNet."""


class _Foreign:
    """Stands in for every class that a file names and that is no tensor: it takes what it is given and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass


def read_weights(path: Path, *, key: str, expected: str) -> State:
    """The tensors of a .safetensors file, or of what torch.save wrote: at the top, under "state_dict" or "network".

    Nothing in the file is run. Lightning's checkpoints name classes of their own (callbacks, settings); these are read
    as empty stand-ins.

    Args:
        path: the file.
        key: what the user set, for messages, such as "encoder.weights".
        expected: what the file should hold, for messages.

    Raises:
        UserError: it is missing, unreadable, would have to be run to be read, or holds no tensors by name.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is no file"
        raise UserError(f"{key} = {str(path)!r} {found}: expected {expected}.")
    try:
        content: Any = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else _load_tensors_only(path)
    except (
        safetensors.SafetensorError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
    ) as error:
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
    return {str(name): tensor for name, tensor in content.items()}


def _load_tensors_only(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if any(name.startswith(("torch", "torchvision")) for name in names):
            raise  # a pickled module: its tensors are inside of it, where stand-ins would drop them
        with torch.serialization.safe_globals([(_Foreign, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def naming(state: Mapping[str, Tensor]) -> Naming:
    """Whose names a state dict has; unknown ones are taken for torchvision's, and a check of those will say so."""
    for name, prefix in _PREFIXES.items():
        if any(key.startswith(prefix) for key in state):
            return name
    return "torchvision"


def encoder_state(state: Mapping[str, Tensor]) -> State:
    """The encoder in its library's names, from any known naming; other tensors of a known naming are left out."""
    found = naming(state)
    if found == "torchvision":
        return dict(state)
    prefix = _PREFIXES[found]
    inner = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    if found == "lightning":
        names = {str(number): module for number, module in enumerate(_LIGHTNING)}
        parts = ((*key.partition("."), tensor) for key, tensor in inner.items())
        return {f"{names.get(number, number)}{dot}{rest}": tensor for number, dot, rest, tensor in parts}
    return inner


def resnet_name(state: Mapping[str, Tensor]) -> str | None:
    """Which ResNet a state dict in torchvision's names is of, by its blocks; None if it is none of the five."""
    blocks = {match[0] for match in (re.match(r"layer\d\.\d+\.", key) for key in state) if match}
    deep = {16: "resnet50", 33: "resnet101", 50: "resnet152"}
    return (deep if "layer1.0.conv3.weight" in state else {8: "resnet18", 16: "resnet34"}).get(len(blocks))


def to_lightning(network: Mapping[str, Tensor]) -> State:
    """A pre-training network of ours in the names of the authors' pre-training code, projection head included."""
    renamed = {}
    for key, tensor in network.items():
        if key.startswith("encoder.resnet."):
            module, dot, rest = key.removeprefix("encoder.resnet.").partition(".")
            renamed[f"encoder.features.{_LIGHTNING.index(module)}{dot}{rest}"] = tensor
        elif key.startswith("projector."):
            renamed[f"projection_head.{key.removeprefix('projector.')}"] = tensor
    return renamed


def pose_from_published(state: Mapping[str, Tensor]) -> State:
    """A pose network of the authors in our names, order and units, for `PoseNetwork` with the palm as keypoint 0.

    Their last layer gives x and y in pixels of a 224-pixel view, ours in units of its side from its centre; theirs has
    a 64th output, which nothing reads.

    Shapes are not checked here.
    """
    ours = {f"encoder.resnet.{key}": tensor for key, tensor in encoder_state(state).items() if key[:3] != "fc."}
    rows = hand_rows("peclr", "freihand")
    unit, center = _pixels(PUBLISHED_SIDE_PX)
    weight, bias = state["backend_model.fc.weight"][:-1], state["backend_model.fc.bias"][:-1]
    ours["head.weight"] = (_by_keypoint(weight)[rows] / unit[:, None]).flatten(0, 1).to(weight.dtype)
    ours["head.bias"] = (_by_keypoint(bias)[rows] / unit - center).flatten().to(bias.dtype)
    return ours | _refinement(state, "zroot_ref.", "refinement.", rows)


def pose_to_published(network: Mapping[str, Tensor], *, side_px: int) -> State:
    """The inverse of `pose_from_published`, for a network of linear head and refinement.

    Args:
        network: state of a `PoseNetwork`.
        side_px: of the views that it was trained on: the result's 2D keypoints are in pixels of such.
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
    """Unit of x, y and depth in theirs, and the view's centre in units of its side."""
    return torch.tensor([side_px, side_px, 1], dtype=torch.float64), torch.tensor([0.5, 0.5, 0], dtype=torch.float64)


def _by_keypoint(values: Tensor) -> Tensor:
    """(63, ...) -> (21, 3, ...), double, so that converting there and back loses nothing but the last rounding."""
    return values.double().reshape(len(HAND), 3, *values.shape[1:])


def _refinement(state: Mapping[str, Tensor], prefix: str, new_prefix: str, rows: list[int]) -> State:
    """The refinement under another prefix, its inputs in another order: depths, X and Y of each, the root's depth."""
    count = len(HAND)
    pairs = [count + 2 * row + axis for row in rows for axis in (0, 1)]
    columns = [*rows, *pairs, 3 * count]
    renamed = {new_prefix + key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    first = f"{new_prefix}zroot_ref.0.weight"
    return renamed | {first: renamed[first][:, columns]}


def check_state(
    state: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    *,
    origin: str,
    model: str,
    remedy: str,
    ignored: Callable[[str], bool] = lambda key: False,
) -> None:
    """Whether a state dict has the names and shapes that it should have.

    Args:
        state: what was read.
        wanted: what is expected.
        origin: the file, for messages.
        model: what `wanted` is of, for messages.
        remedy: the last part of the message.
        ignored: names that may be there or not.

    Raises:
        UserError: it has not; the first difference is named.
    """
    problems = [f"{key} is missing" for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    problems += [
        f"{key} is {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in state and state[key].shape != value.shape
    ]
    problems += [f"{key} is unknown" for key in state if key not in wanted and not ignored(key)]
    if problems:
        more = f" and {len(problems) - 1} more such" if len(problems) > 1 else ""
        raise UserError(f"{origin} does not fit {model}: {problems[0]}{more}: {remedy}")

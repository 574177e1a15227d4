"""Weights: file -> tensors by name (`read_weights`) -> the library's names (`encoder_state`) -> `load_strictly`."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.skeleton import HAND, hand_rows

State = dict[str, Tensor]

PUBLISHED_SIDE_PX: Final = 224
"""Side of the views of the authors' pose networks; their 2D keypoints are in pixels of such a view."""
OURS: Final = ("encoder.resnet.", "encoder.network.")
"""What the names of an encoder's tensors begin with in a checkpoint of this project."""

VITPOSE_PICTURE_PX: Final = (256, 192)
"""Height and width of the pictures that ViTPose's ViT sees, in HaMeR and WiLoR too."""

_CHILDREN: Final = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
"""torchvision's names of the modules 0, 1, ... of `nn.Sequential(*resnet.children())`."""

log = logging.getLogger(__name__)


class _StandIn:
    """In the place of an object that is no tensor: a dict, since settings are often a subclass of dict, or empty."""

    def __new__(cls, *arguments: object) -> Any:
        """torch fills only its own kinds of dicts, an OrderedDict's attributes too."""
        return super().__new__(cls) if arguments else OrderedDict()

    def __init__(self, *_: object, **__: object) -> None: ...

    __setstate__ = __init__


def read_weights(path: Path, *, key: str, expected: str) -> State:
    """Read tensors by name from a file of safetensors or torch.save, whatever its name ends in.

    The tensors are at the top level, or under "state_dict", "network" or "model". No code in the file is run. Objects
    of other classes, such as the callbacks and settings in Lightning's checkpoints, are left out.

    Raises:
        UserError: the file cannot be read or only by running its code, has no tensors by name, or one is not finite.
            The message has the `key` that names the file, such as "encoder.weights", and what is `expected`.
    """
    origin = f"{key} = {str(path)!r}"
    if not path.is_file():
        raise UserError(f"{origin} {'is no file' if path.exists() else 'does not exist'}: expected {expected}.")
    try:
        content: Any = safetensors.torch.load_file(path) if is_safetensors(path) else _load_tensors_only(path)
    except MemoryError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for other files
        raise UserError(
            f"{origin} cannot be read as a file of tensors: expected {expected}, saved by torch.save or safetensors."
        ) from error
    if isinstance(content, Mapping):
        content = next((content[at] for at in ("state_dict", "network", "model") if at in content), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{origin} holds no tensors by name, at the top or under 'state_dict': expected {expected}.")
    state = {str(name): tensor for name, tensor in content.items()}
    require_finite(state, origin)
    return state


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one of safetensors: the length of its header in 8 bytes, then JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _load_tensors_only(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if any(name.startswith(("torch", "torchvision")) for name in names):
            raise  # a pickled module holds its tensors inside, and a stand-in would drop them
        with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def encoder_state(state: Mapping[str, Tensor], wanted: Collection[str], origin: str) -> State:
    """An encoder's tensors in its library's names, from a file in which those names may have a prefix.

    The prefix may be that of our checkpoints, of the authors' pose networks ("backend_model."), of DataParallel
    ("module."), of a compiled network ("_orig_mod.") or of another trainer ("backbone.", "encoder_q."). With a prefix,
    all other tensors are left out. Of several encoders, such as MoCo's two, the first in the file is taken. The log
    has the prefix and the `origin`, which is the file. `wanted` are the library's names.
    """
    if "layer1.0.conv1.weight" in wanted:
        state = with_named_children(state)
    some = next(iter(wanted))
    prefixes = [key.removesuffix(some) for key in state if key == some or key.endswith(f".{some}")]
    shares = {prefix: sum(prefix + name in state for name in wanted) for prefix in prefixes}
    prefix = max(shares, key=shares.__getitem__, default="")
    if prefix and prefix not in OURS:
        others = [repr(other) for other in shares if shares[other] == shares[prefix] and other != prefix]
        log.info("%s: taken are the tensors of %r%s", origin, prefix, "".join(f", not {other}" for other in others))
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def with_named_children(state: Mapping[str, Tensor]) -> State:
    """Give the numbered modules of a torchvision ResNet their names: those of the authors' Lightning checkpoints."""
    numbered = [match[1] for match in (re.fullmatch(r"((?:.*\.)?)4\.0\.conv1\.weight", key) for key in state) if match]
    for prefix in numbered:
        for number, name in enumerate(_CHILDREN):
            old, new = f"{prefix}{number}.", f"{prefix}{name}."
            state = {new + key[len(old) :] if key.startswith(old) else key: value for key, value in state.items()}
    return dict(state)


def resnet_name(state: Mapping[str, Tensor]) -> str | None:
    """Name of the ResNet whose tensors are in a file, in torchvision's names behind any prefix; None if it is none."""
    blocks = {match[0] for match in (re.search(r"\blayer\d\.\d+\.", key) for key in state) if match}
    is_deep = any(key.endswith("layer1.0.conv3.weight") for key in state)
    names = {16: "resnet50", 33: "resnet101", 50: "resnet152"} if is_deep else {8: "resnet18", 16: "resnet34"}
    return names.get(len(blocks))


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


def vitpose_from_timm(state: Mapping[str, Tensor]) -> State:
    """Give a ViT of timm the names and positions of ViTPose's, as HaMeR and WiLoR load it (their backbones/vit.py).

    Positions, of a square of patches (1, [1 +] S * S, C), are resampled for 256 x 192 pixels as timm does it: (1, 193,
    C). ViTPose's ViT has no class token, and adds position 0 to all others: it is zero. Its patches begin 2 pixels
    further left and further up.

    Raises:
        UserError: the network has other layers than that ViT, patches of another size, or no learnt positions.
    """
    named = {re.sub(r"^norm\.", "last_norm.", key): tensor for key, tensor in state.items() if key != "cls_token"}
    blocks = {key.split(".")[1] for key in named if key.startswith("blocks.")}
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    layers = ["patch_embed.proj", "last_norm", *(f"blocks.{block}.{part}" for block in blocks for part in parts)]
    differing = named.keys() ^ {"pos_embed", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))}
    if differing or named["patch_embed.proj.weight"].shape[-1] != 16:
        raise UserError(
            f"--keys vitpose: ViTPose's ViT differs in {min(differing, default='its patches')}; expected a plain ViT "
            "of timm with patches of 16 pixels and absolute positions, such as timm/vit_small_patch16_224"
        )
    positions = named["pos_embed"].float()
    side = math.isqrt(positions.shape[1])
    square = positions[:, -side * side :].mT.reshape(1, -1, side, side)
    resampled = F.interpolate(square, [px // 16 for px in VITPOSE_PICTURE_PX], mode="bicubic", antialias=True)
    return {**named, "pos_embed": F.pad(resampled.flatten(2).mT, (0, 0, 1, 0))}


def require_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Raise a `UserError` with the `origin` (a file) unless tensors are real and finite in float32.

    Networks compute in float32. A tensor of the device "meta" has no numbers.
    """
    for name, tensor in state.items():
        is_dense = tensor.layout is torch.strided and not tensor.is_meta
        has_numbers = is_dense and not tensor.is_complex() and not tensor.is_quantized
        if not (has_numbers and bool(tensor.float().isfinite().all())):
            found = "NaN or infinity" if has_numbers else "no plain numbers (sparse, complex, quantized or on meta)"
            raise UserError(f"{origin}: {name} holds {found}; expected finite weights. Name another file")
        if name.endswith("running_var") and bool((tensor.float() < 0).any()):  # their root would be NaN in evaluation
            raise UserError(f"{origin}: {name} is negative somewhere; expected variances. Name another file")


def load_strictly(network: nn.Module, state: Mapping[str, Tensor], *, origin: str, model: str) -> None:
    """Load tensors by name: all that the network has, and no others.

    Raises:
        UserError: a name, a shape or the kind of numbers differs; it says that `origin` does not fit `model`.
    """
    for name, own in network.state_dict().items():
        if name in state and own.is_floating_point() and not state[name].is_floating_point():
            found = f"{name} has numbers of {state[name].dtype}, and not of {own.dtype}"
            raise UserError(f"{origin} does not fit {model}: {found}. Name another file")
    try:
        network.load_state_dict(state)  # adds the batch counters that files from before 2018 lack
    except RuntimeError as error:
        raise UserError(f"{origin} does not fit {model}: {in_one_line(error, 300)}. Name another file") from error

"""Weights: file -> tensors by name (`read_weights`) -> the library's names (`encoder_state`) -> `load_strictly`."""

import logging
import pickle
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError

State = dict[str, Tensor]

OURS = ("encoder.resnet.", "encoder.network.")
"""What the names of an encoder's tensors begin with in a checkpoint of this project."""

# torchvision's names of the modules 0, 1, ... of `nn.Sequential(*resnet.children())`.
_CHILDREN = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")

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
    if not path.is_file() or path.resolve().is_relative_to("/proc"):
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


def require_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Raise a `UserError` with the `origin` (a file) unless tensors are real and finite in float32.

    Networks compute in float32. A tensor of the device "meta" has no numbers.
    """
    for name, tensor in state.items():
        is_dense = tensor.layout is torch.strided and not tensor.is_meta
        found = ""
        if not is_dense or tensor.is_complex() or tensor.is_quantized:
            found = "holds no plain numbers (sparse, complex, quantized or on meta); expected finite weights"
        elif not bool(tensor.float().isfinite().all()):
            found = "holds NaN or infinity; expected finite weights"
        elif name.endswith("running_var") and bool((tensor.float() < 0).any()):  # their root would be NaN in evaluation
            found = "is negative somewhere; expected variances"
        if found:
            raise UserError(f"{origin}: {name} {found}. Name another file")


def load_strictly(network: nn.Module, state: Mapping[str, Tensor], *, origin: str, model: str) -> None:
    """Load tensors by name: all that the network has, and no others.

    Batch norm's counters may be missing, as in files from before 2018; they are 0 then.

    Raises:
        UserError: a name, a shape or the kind of numbers differs; it says that `origin` does not fit `model`, and names
            the first few differences.
    """
    own, faults = network.state_dict(), []
    for name, tensor in own.items():
        if name not in state:
            faults += [] if name.endswith("num_batches_tracked") else [f"{name} is missing"]
        elif state[name].shape != tensor.shape:
            faults.append(f"{name} has the shape {tuple(state[name].shape)}, and not {tuple(tensor.shape)}")
        elif tensor.is_floating_point() and not state[name].is_floating_point():
            faults.append(f"{name} has numbers of {state[name].dtype}, and not of {tensor.dtype}")
    faults += [f"{name} is not known" for name in state if name not in own]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"{origin} does not fit {model}: {', '.join(faults[:3])}{more}. Name another file")
    network.load_state_dict(state)

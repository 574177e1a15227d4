"""Encoders: torchvision's ResNets without their classifier, under torchvision's own parameter names."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch
import torch
import torchvision
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from errors import UserError


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EncoderConfig:
    """Which encoder, and what its weights start from.

    Attributes:
        name: a torchvision ResNet.
        weights: "imagenet" (torchvision's IMAGENET1K_V1, what the authors start from), "random", or the path of a file
            with a torchvision ResNet state dict: .safetensors, or .pth, there also under the key "state_dict".
    """

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    weights: str = "imagenet"


class Encoder(nn.Module):
    """A torchvision ResNet up to its global average pooling.

    Attributes:
        feature_dim: C, the length of a feature vector: 512 for ResNet-18 and -34, else 2048.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        resnet = torchvision.models.get_model(name, weights=None)
        self.feature_dim: int = resnet.fc.in_features
        resnet.fc = nn.Identity()
        self.resnet = resnet

    def forward(self, image: Tensor) -> Tensor:
        """Pooled features.

        Args:
            image: (N, 3, S, S) float, normalised with ImageNet's mean and deviation if the weights come from there.

        Returns:
            (N, feature_dim).
        """
        features: Tensor = self.resnet(image)
        return features

    def torchvision_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers, not copied, under the names of torchvision's ResNet, without `fc`."""
        return dict(self.resnet.state_dict())


def build_encoder(config: EncoderConfig) -> Encoder:
    """The encoder with its starting weights, on the CPU.

    Raises:
        UserError: the ImageNet weights cannot be downloaded, or the file is missing, unreadable or of another model.
    """
    encoder = Encoder(config.name)
    if config.weights == "random":
        return encoder
    if config.weights == "imagenet":
        state, origin = _imagenet_state(config.name), "torchvision's ImageNet weights"
    else:
        state, origin = _read_state(Path(config.weights)), config.weights
    _check_state(state, encoder, config.name, origin)
    # torch adds the batch counters that files from before 2018 lack, since a plain dict carries no version.
    encoder.resnet.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")})
    return encoder


def _imagenet_state(name: str) -> Mapping[str, Tensor]:
    weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]
    try:
        state: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network, a proxy's answer, a broken or half-written cache
        raise UserError(
            f'encoder.weights = "imagenet": {weights.url} cannot be downloaded ({_one_line(error)}): '
            'set encoder.weights = "random", or to the path of a torchvision state dict (.pth or .safetensors).'
        ) from error
    return state


def _read_state(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise UserError(
            f"encoder.weights = {str(path)!r} is no file: "
            'expected a torchvision ResNet state dict (.pth or .safetensors), "imagenet" or "random".'
        )
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
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
            f"encoder.weights = {str(path)!r} cannot be read as a file of tensors only: "
            "expected a torchvision ResNet state dict saved by torch.save or safetensors."
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(
            f"encoder.weights = {str(path)!r} holds no state dict: expected names to tensors, "
            'at the top or under "state_dict".'
        )
    return content


def _check_state(state: Mapping[str, Tensor], encoder: Encoder, name: str, origin: str) -> None:
    wanted = encoder.torchvision_state_dict()
    problems = [f"{key} is missing" for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    problems += [
        f"{key} is {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in state and state[key].shape != value.shape
    ]
    problems += [f"{key} is unknown" for key in state if key not in wanted and not key.startswith("fc.")]
    if problems:
        more = f" and {len(problems) - 1} more such" if len(problems) > 1 else ""
        raise UserError(
            f"encoder.weights: {origin} does not fit encoder.name = {name!r}: {problems[0]}{more}: "
            "expected torchvision's names and shapes; set encoder.name to the model of the file."
        )


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

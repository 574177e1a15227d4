"""Encoders: networks without their classifier, under the parameter names of the library that they are from."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torchvision
from torch import Tensor, nn

from errors import UserError
from models.config import ENCODERS, EncoderConfig
from models.weights import check_state, encoder_state, read_weights


class Encoder(nn.Module):
    """A network up to its pooled features. A subclass is built with its name, and sets what is named here.

    Attributes:
        feature_dim: C, the length of a feature vector.
        inner: the attribute that holds the network; a checkpoint calls its tensors "encoder.INNER.NAME".
        library: whose names the tensors have.
        classifier: what the names of tensors begin with that are left out in loading.
    """

    feature_dim: int
    inner: ClassVar[str] = "network"
    library = "the encoder"
    classifier: tuple[str, ...] = ()

    def forward(self, image: Tensor) -> Tensor:
        """Pooled features: (N, 3, S, S) float, normalised as `models.network.Normalize` does, to (N, feature_dim)."""
        features: Tensor = getattr(self, self.inner)(image)
        return features

    def library_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers, not copied, under the library's names, without the classifier."""
        return dict(getattr(self, self.inner).state_dict())

    def load_library_state(self, state: Mapping[str, Tensor], origin: str, name: str) -> None:
        """The inverse; a `UserError` that names the origin and the encoder if a name or a shape does not fit."""
        check_state(
            state,
            self.library_state_dict(),
            origin=f"encoder.weights: {origin}",
            model=f"encoder.name = {name!r}",
            remedy=f"expected {self.library}'s names and shapes; set encoder.name to the model of the file.",
            ignored=lambda key: key.startswith(self.classifier),
        )
        # torch adds the batch counters that files from before 2018 lack, since a plain dict carries no version.
        kept = {key: value for key, value in state.items() if not key.startswith(self.classifier)}
        getattr(self, self.inner).load_state_dict(kept)

    def published_state(self) -> tuple[Mapping[str, Tensor], str]:
        """What `encoder.weights = "imagenet"` stands for, and its origin; a `UserError` if it cannot be had."""
        raise UserError(f'encoder.weights = "imagenet": {self.library} has none. Set it to "random" or a file.')


class ResNet(Encoder):
    """A torchvision ResNet up to its global average pooling; C is 512 for ResNet-18 and -34, else 2048."""

    inner = "resnet"
    library = "torchvision"
    classifier = ("fc.",)

    def __init__(self, name: str) -> None:
        super().__init__()
        resnet = torchvision.models.get_model(name, weights=None)
        self.feature_dim = resnet.fc.in_features
        resnet.fc = nn.Identity()
        self.resnet = resnet
        self._weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]

    def published_state(self) -> tuple[Mapping[str, Tensor], str]:
        """torchvision's IMAGENET1K_V1."""
        try:
            state: Mapping[str, Tensor] = self._weights.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's answer, a broken or half-written cache
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f'encoder.weights = "imagenet": {self._weights.url} cannot be downloaded ({reason}): '
                'set encoder.weights = "random", or to the path of a torchvision state dict (.pth or .safetensors).'
            ) from error
        return state, "torchvision's ImageNet weights"


def make_encoder(name: str) -> Encoder:
    """The encoder of a name of `ENCODERS`, with random weights, on the CPU."""
    encoder: Encoder = pkgutil.resolve_name(ENCODERS[name])(name)
    return encoder


def build_encoder(config: EncoderConfig) -> Encoder:
    """The encoder with its starting weights, on the CPU.

    Raises:
        UserError: the ImageNet weights cannot be downloaded, or the file is missing, unreadable or of another model.
    """
    encoder = make_encoder(config.name)
    if config.weights == "imagenet":
        encoder.load_library_state(*encoder.published_state(), config.name)
    elif config.weights != "random":
        expected = 'the weights of a torchvision ResNet (.pth or .safetensors), "imagenet" or "random"'
        state = encoder_state(read_weights(Path(config.weights), key="encoder.weights", expected=expected))
        encoder.load_library_state(state, config.weights, config.name)
    return encoder

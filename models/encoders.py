"""Encoders: torchvision's ResNets without their classifier, under torchvision's own parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torchvision
from torch import Tensor, nn

from errors import UserError
from models.config import EncoderConfig
from models.weights import check_state, encoder_state, read_weights


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
        """Pooled features: (N, 3, S, S) float, normalised as `models.network.Normalize` does, to (N, feature_dim)."""
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
        expected = 'the weights of a torchvision ResNet (.pth or .safetensors), "imagenet" or "random"'
        state = encoder_state(read_weights(Path(config.weights), key="encoder.weights", expected=expected))
        origin = config.weights
    check_state(
        state,
        encoder.torchvision_state_dict(),
        origin=f"encoder.weights: {origin}",
        model=f"encoder.name = {config.name!r}",
        remedy="expected torchvision's names and shapes; set encoder.name to the model of the file.",
        ignored=lambda key: key.startswith("fc."),
    )
    # A plain dict has no version, so torch adds the batch counters that files from before 2018 lack.
    encoder.resnet.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")})
    return encoder


def _imagenet_state(name: str) -> Mapping[str, Tensor]:
    weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]
    try:
        state: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network, an error page of a proxy, or a damaged cache
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f'encoder.weights = "imagenet": {weights.url} cannot be downloaded ({reason}): '
            'set encoder.weights = "random", or to the path of a torchvision state dict (.pth or .safetensors).'
        ) from error
    return state

"""Encoders: networks without their classifier, with the library's own parameter names."""

import pkgutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import torchvision
from torch import Tensor, nn

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models.config import WEIGHTS_EXPECTED, EncoderConfig, encoder_class
from peclr_dali.models.weights import encoder_state, load_strictly, read_weights
from peclr_dali.parsing import or_shipped


class Encoder(nn.Module):
    """A network up to its pooled features.

    The constructor of a subclass takes the encoder's name and the side of the views in pixels, and sets the attributes.

    Attributes:
        feature_dim: C, the length of a feature vector.
        inner: the attribute that holds the network; a checkpoint calls its tensors "encoder.INNER.NAME".
        library: the library whose tensor names are used.
        classifier: prefixes of the tensor names that are left out in loading.
    """

    feature_dim: int
    inner: ClassVar[Literal["network", "resnet"]] = "network"
    library = "the encoder"
    classifier: tuple[str, ...] = ()

    def forward(self, image: Tensor) -> Tensor:
        """Pooled features: (N, 3, S, S) float, normalised as models/network.py does, to (N, feature_dim).

        Raises:
            TypeError: the pixels are whole numbers, as the loader gives them.
        """
        if not image.is_floating_point():
            raise TypeError(f"image is of {image.dtype}, expected floats: divide by 255 and normalise it first")
        features: Tensor = getattr(self, self.inner)(image)
        return features

    def undecayed(self) -> Collection[str]:
        """Names, as in the library, of parameters without weight decay; biases and norm parameters have none anyway."""
        return ()

    def library_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers, not copied, under the library's names, without the classifier."""
        return dict(getattr(self, self.inner).state_dict())

    def note_on_file(self, file: Path) -> str:
        """A note for the user of a file with `library_state_dict`: how to load it."""
        return f"{self.library}'s names" + "".join(f", without {prefix.rstrip('.')}" for prefix in self.classifier)

    def load_weights(self, state: Mapping[str, Tensor], origin: str, name: str) -> None:
        """Load the encoder's tensors from those of a file or network, in which their names may have a prefix.

        Raises:
            UserError: a name or shape does not fit the encoder `name`; the message has the origin.
        """
        state = self.resampled(encoder_state(state, self.library_state_dict(), origin))
        kept = {key: value for key, value in state.items() if not key.startswith(self.classifier)}
        load_strictly(getattr(self, self.inner), kept, origin=origin, model=f"encoder.name = {name!r}")

    def resampled(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors, in the library's names, that depend on the size of the views, for this encoder's size."""
        return state

    def published_state(self) -> tuple[Mapping[str, Tensor], str]:
        """The weights for `encoder.weights = "imagenet"`, and their origin. Without such weights: a `UserError`."""
        raise UserError(f'encoder.weights = "imagenet": {self.library} has no such weights. Set "random" or a file.')


class ResNet(Encoder):
    """A torchvision ResNet up to its global average pooling; C is 512 for ResNet-18 and -34, else 2048."""

    inner = "resnet"
    library = "torchvision"
    classifier = ("fc.",)

    def __init__(self, name: str, side_px: int | None = None) -> None:
        super().__init__()
        resnet = torchvision.models.get_model(name, weights=None)
        self.feature_dim = resnet.fc.in_features
        resnet.fc = nn.Identity()
        self.resnet = resnet
        self._weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]

    def published_state(self) -> tuple[Mapping[str, Tensor], str]:
        """torchvision's weights IMAGENET1K_V1."""
        try:
            state: Mapping[str, Tensor] = self._weights.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's answer, a broken or half-written cache
            raise UserError(
                f'encoder.weights = "imagenet": {self._weights.url} cannot be downloaded ({in_one_line(error)}): '
                'set encoder.weights = "random", or to the path of a torchvision state dict (.pth or .safetensors).'
            ) from error
        return state, "torchvision's ImageNet weights"


def make_encoder(name: str, side_px: int | None = None) -> Encoder:
    """The encoder of a name that `EncoderConfig` takes, with random weights, on the CPU.

    Args:
        name: name of the encoder.
        side_px: side of the views; None: the side that the network was designed for.

    Raises:
        UserError: the encoder cannot be built, or not for views of this size.
    """
    encoder: Encoder = pkgutil.resolve_name(encoder_class(name) or "")(name, side_px)
    return encoder


def build_encoder(config: EncoderConfig, side_px: int | None = None) -> Encoder:
    """The encoder with its starting weights, on the CPU; arguments as `make_encoder`.

    Raises:
        UserError: the encoder cannot be built for this size, the published weights cannot be downloaded, or the file is
            missing, unreadable or of another model.
    """
    encoder = make_encoder(config.name, side_px)
    if config.weights == "imagenet":
        encoder.load_weights(*encoder.published_state(), config.name)
    elif config.weights != "random":
        state = read_weights(
            or_shipped(Path(config.weights), ".safetensors"), key="encoder.weights", expected=WEIGHTS_EXPECTED
        )
        encoder.load_weights(state, f"encoder.weights = {config.weights!r}", config.name)
    return encoder

"""The network of pre-training: pixels in, projections out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peclr_dali.models.config import EncoderConfig, ProjectorConfig
from peclr_dali.models.encoders import Encoder, build_encoder

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """Normalises 8-bit pixels by ImageNet's mean and deviation, as torchvision's weights expect."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        self.register_buffer("scale", (1 / (255 * std))[:, None, None], persistent=False)
        self.register_buffer("shift", (-mean / std)[:, None, None], persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, S, S) uint8 -> (N, 3, S, S) of the same memory format.

        The result has the parameters' dtype. Under autocast it has autocast's 16-bit type, to which the first layer
        would round anyway.
        """
        device, knows_autocast = image.device.type, torch.amp.autocast_mode.is_autocast_available  # not "meta"
        if torch.compiler.is_compiling() or not (knows_autocast(device) and torch.is_autocast_enabled(device)):
            return image.to(self.scale.dtype) * self.scale + self.shift  # compiled, it is one pass too
        rounded = torch.empty_like(image, dtype=torch.get_autocast_dtype(device))
        return torch.addcmul(self.shift, image, self.scale, out=rounded)  # in float32; one pass on a GPU


class ContrastiveNetwork(nn.Module):
    """Normalisation, the encoder, which is kept after pre-training, and the projection head, which is not."""

    def __init__(self, encoder: Encoder, projector: nn.Module) -> None:
        super().__init__()
        self.normalize = Normalize()
        self.encoder = encoder
        self.projector = projector

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, S, S) uint8 -> (N, D) projections."""
        projection: Tensor = self.projector(self.encoder(self.normalize(image)))
        return projection


def build_projector(config: ProjectorConfig, feature_dim: int) -> nn.Sequential:
    """Linear, batch norm, ReLU, linear without bias: (N, feature_dim) -> (N, config.dim).

    The authors' head; the paper only says z in R^(m x 2) (section 3.2).
    """
    return nn.Sequential(
        nn.Linear(feature_dim, config.hidden),
        nn.BatchNorm1d(config.hidden),
        nn.ReLU(inplace=True),
        nn.Linear(config.hidden, config.dim, bias=False),
    )


def build_network(encoder: EncoderConfig, projector: ProjectorConfig, side_px: int | None = None) -> ContrastiveNetwork:
    """Build the network of a configuration, with its starting weights, for views of `side_px` (see `make_encoder`).

    Raises:
        UserError: weights that cannot be read or do not fit.
    """
    built = build_encoder(encoder, side_px)
    return ContrastiveNetwork(built, build_projector(projector, built.feature_dim))

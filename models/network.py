"""The network of pre-training: pixels in, projections out; and measures of its health."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali.models.config import EncoderConfig, ProjectorConfig
from peclr_dali.models.encoders import Encoder, build_encoder
from peclr_dali.models.nt_xent import TILE_ELEMENTS
from peclr_dali.models.tensor_checks import require_floats

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

        Raises:
            TypeError: the pixels are not uint8, such as those that are divided by 255 already.
        """
        if image.dtype != torch.uint8:
            raise TypeError(f"image is of {image.dtype}, expected uint8 as the loader gives it: leave out '/ 255'")
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


class Health(NamedTuple):
    """Scalars on the device of the embeddings.

    Attributes:
        alignment: mean squared distance within positive pairs on the unit sphere; 0 is perfect, 2 is chance.
        uniformity: log of the mean of exp(-2 d^2) over the pairs of different samples of one view, d their distance on
            the unit sphere, averaged over both views; 0 is collapse, about -4 uniform in many dimensions.
        positive_rank: mean rank of the positive among the 2N - 1 others by cosine; 1 is best, N is chance. Ties take
            their middle rank, so collapse also gives N.
    """

    alignment: Tensor
    uniformity: Tensor
    positive_rank: Tensor


@torch.no_grad()
def health(embeddings: Tensor) -> Health:
    """Alignment and uniformity (Wang and Isola 2020, section 4.1.2, alpha = t = 2) and the positives' mean rank.

    Args:
        embeddings: (2, N, D), both views of N >= 2 samples, of any length.

    Raises:
        ValueError: another shape, or a single sample.
    """
    require_floats("embeddings", embeddings, (2, "N", "D"))
    samples = embeddings.shape[1]
    with torch.autocast(embeddings.device.type, enabled=False):
        unit = F.normalize(embeddings if embeddings.dtype == torch.float64 else embeddings.float(), dim=2)
        alignment = (unit[0] - unit[1]).square().sum(dim=1).mean()

        tolerance = 32 * torch.finfo(unit.dtype).eps  # equal cosines differ by rounding, at most by about 8 eps
        strip = max(1, TILE_ELEMENTS // (2 * samples))  # rows of the similarity matrix in memory at once
        crowding: list[Tensor] = []  # of each embedding: log of the sum of exp(-2 d^2) over the others of its view
        rank_sum = unit.new_zeros((), dtype=torch.float64)
        for view in (0, 1):
            for first in range(0, samples, strip):
                cosine = unit[view, first : first + strip] @ unit.flatten(0, 1).T  # (s, 2N)
                positive = cosine.diagonal((1 - view) * samples + first)[:, None].clone()  # (s, 1)
                cosine.diagonal(view * samples + first).fill_(float("-inf"))  # itself
                better = (cosine > positive + tolerance).sum(dim=1)
                tied = ((cosine - positive).abs() <= tolerance).sum(dim=1) - 1  # without the positive
                rank_sum += (1 + better + tied / 2).sum()
                # -2 d^2, with d^2 = 2 - 2 cos
                crowding.append((4 * (cosine[:, view * samples : (view + 1) * samples] - 1)).logsumexp(dim=1))
        uniformity = (torch.cat(crowding).view(2, samples).logsumexp(dim=1) - math.log(samples * (samples - 1))).mean()
        positive_rank = (rank_sum / (2 * samples)).to(unit.dtype)
    return Health(alignment, uniformity, positive_rank)

"""The projection head, which pre-training needs and fine-tuning drops."""

from __future__ import annotations

from pydantic import ConfigDict, field_validator
from pydantic.dataclasses import dataclass
from torch import nn

from bounds import Count


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ProjectorConfig:
    """Sizes of the projection head; the defaults are the authors'.

    Attributes:
        hidden: width of the hidden layer.
        dim: D = 2m, length of a projection.
    """

    hidden: Count = 512
    dim: Count = 128

    @field_validator("dim")
    @classmethod
    def _dim_holds_points(cls, value: int) -> int:
        if value % 2:
            raise ValueError(
                f"dim = {value}, expected an even number: a projection is read as dim / 2 points (x, y) in latent "
                f"space, which the inverse transformation moves; {value + 1} would do"
            )
        return value


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

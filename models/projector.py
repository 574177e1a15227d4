"""The projection head, which pre-training needs and fine-tuning drops."""

from __future__ import annotations

from torch import nn

from models.config import ProjectorConfig


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

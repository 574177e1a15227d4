"""Ridge regression in closed form, and what it learns to read from features."""

from __future__ import annotations

import torch
from torch import Tensor

from peclr_dali.train.pose.labels import PoseTargets


def fit_ridge(features: Tensor, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Minimise |targets - X W - b|^2 + alpha |W|^2, where X are the standardised features; b is not penalised.

    scikit-learn's StandardScaler and Ridge(alpha) give the same map.

    Args:
        features: (N, D) float64.
        targets: (N, T) float64.
        alpha: positive, so that there is one solution for any N > 0.

    Returns:
        Weight (T, D) and bias (T,) of the map of features as they are, as in `torch.nn.Linear`.
    """
    mean, deviation = features.mean(0), features.std(0, correction=0)
    # The rounding of the mean leaves a constant feature a tiny deviation.
    deviation = deviation.where(deviation > 1e-12 * mean.abs(), 1.0)
    standardised, intercept = (features - mean) / deviation, targets.mean(0)
    gram = standardised.mT @ standardised
    gram.diagonal().add_(alpha)
    coefficients = torch.linalg.solve(gram, standardised.mT @ (targets - intercept))
    weight = (coefficients / deviation[:, None]).mT
    return weight, intercept - weight @ mean


def poses_to_read(targets: PoseTargets, side_px: int) -> Tensor:
    """2.5D poses (N, K, 3), as a linear head of `PoseNetwork` gives them.

    x and y are from the middle of the view, in sides of it; the depth is minus the root's, over the reference bone's
    length, NaN if it is not known.
    """
    return torch.cat([targets.keypoints_px / side_px - 0.5, targets.relative_depth[..., None]], dim=2)

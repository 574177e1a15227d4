"""Ridge regression in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


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

"""Ridge regression in closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ridge(NamedTuple):
    """A linear map that was fitted to features (N, D) and targets (N, T).

    Attributes:
        mean: (D,) mean of the features.
        deviation: (D,) standard deviation of the features (divisor N); 1 where a feature is constant.
        coefficients: (D, T) coefficients of the standardised features.
        intercept: (T,) mean of the targets.
    """

    mean: Tensor
    deviation: Tensor
    coefficients: Tensor
    intercept: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Predict T targets from D features: (M, D) -> (M, T)."""
        return (features - self.mean) / self.deviation @ self.coefficients + self.intercept


def fit_ridge(features: Tensor, targets: Tensor, alpha: float) -> Ridge:
    """Minimise |targets - X W - b|^2 + alpha |W|^2, where X are the standardised features; b is not penalised.

    scikit-learn's StandardScaler and Ridge(alpha) give the same map.

    Args:
        features: (N, D) float64.
        targets: (N, T) float64.
        alpha: positive, so that there is one solution for any N > 0.
    """
    mean, deviation = features.mean(0), features.std(0, correction=0)
    # The rounding of the mean leaves a constant feature a tiny deviation.
    deviation = deviation.where(deviation > 1e-12 * mean.abs(), 1.0)
    standardised, intercept = (features - mean) / deviation, targets.mean(0)
    gram = standardised.mT @ standardised
    gram.diagonal().add_(alpha)
    coefficients = torch.linalg.solve(gram, standardised.mT @ (targets - intercept))
    return Ridge(mean, deviation, coefficients, intercept)

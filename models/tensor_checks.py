"""Checks of the tensors that users give to the losses and to the latent inverse."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def require_floats(name: str, value: Any, shape: Sequence[int | str]) -> None:
    """Check a tensor of floats. A letter in `shape` stands for any size above 0.

    Raises:
        TypeError: it is no tensor, not dense, or not of real floats.
        ValueError: it has another shape.
    """
    wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        found = f"a {value.dtype} tensor ({value.layout})" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: found {found}, expected a dense tensor of floats of shape {wanted}")
    if value.ndim != len(shape) or any(
        size == 0 if isinstance(expected, str) else size != expected
        for size, expected in zip(value.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {wanted}")

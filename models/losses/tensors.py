"""Checks the tensors that users give to public functions, without reading their values: that would wait for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def require_floats(name: str, value: Any, shape: Sequence[int | str], *, like: Tensor | None = None) -> None:
    """Check a tensor of floats. A letter in `shape` stands for any size above 0. With `like`, the device is that of it.

    Raises:
        TypeError: it is no tensor, not dense, or not of real floats.
        ValueError: it has another shape, or is on another device.
    """
    wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        found = f"a {value.dtype} tensor ({value.layout})" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: found {found}, expected a dense tensor of floats of shape {wanted}")
    if value.ndim != len(shape) or any(
        size == 0 if isinstance(one, str) else size != one for size, one in zip(value.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {wanted}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, expected {like.device}, where the other tensors are")


def require_pairs(embeddings: Any, *, least: int = 1) -> None:
    """Check that the embeddings are (2, N, D) with N at least `least`. Errors as `require_floats`."""
    require_floats("embeddings", embeddings, (2, "N", "D"))
    if embeddings.shape[1] < least:
        raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}, expected (2, N, D) with N at least {least}")

"""Applies the further augmentations of `views.appearance`: to view after view on a CPU, to tensors on a GPU."""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.views.appearance import CHANGES, AppearanceConfig, Column

_AT_ONCE = 64
"""Views that are changed together."""

_ONE_BY_ONE = frozenset({"cpu"})
"""Devices that change one view after the other. Tests empty this set to compare the GPU's code with the oracle."""

for _helper in {helper for change in CHANGES.values() for helper in change.compiled_with}:
    register_jitable(_helper)
_compiled = cached(numba.njit, nogil=True, fastmath={"contract"}, error_model="numpy")
_ON_CPU = {column: _compiled(one.on_cpu) if one.compiled_with else one.on_cpu for column, one in CHANGES.items()}


def apply_appearance(
    views: Tensor, draws: FloatArray, appearance: AppearanceConfig, share: slice = slice(None)
) -> None:
    """Apply to N views, in place, the augmentations that the draws switch on.

    Args:
        views: (N, S, S, 3) uint8, contiguous.
        draws: (N, COLUMNS) table of draws.
        appearance: configuration of the augmentations.
        share: the views to change.
    """
    if not appearance.active:
        return
    candidates, side_px, device = np.arange(len(views))[share], views.shape[1], views.device
    for column, change in CHANGES.items():
        drawn = candidates[draws[candidates, column] > 0]
        for start in range(0, len(drawn), _AT_ONCE):
            rows = drawn[start : start + _AT_ONCE]
            tables = tuple(to_device(table, device) for table in change.tables(draws[rows], side_px))
            tables += _constants(appearance, side_px, device)[column]
            if device.type in _ONE_BY_ONE:
                _ON_CPU[column](views.numpy(), rows, *(table.numpy() for table in tables))
            else:
                at = to_device(rows, device)
                changed = change.of_tensors(views[at], *tables)
                if changed.is_floating_point():
                    changed = changed.add_(0.5).clamp_(max=255)
                views[at] = changed.to(torch.uint8)


@functools.cache
def _constants(appearance: AppearanceConfig, side_px: int, device: torch.device) -> dict[Column, tuple[Tensor, ...]]:
    """The constants of all augmentations."""
    found = {
        column: tuple(to_device(array, device) for array in change.constants(appearance, side_px))
        for column, change in CHANGES.items()
    }
    if device.type == "cuda":  # waits once for all copies, since the streams of other loaders use them too
        torch.cuda.current_stream(device).synchronize()
    return found

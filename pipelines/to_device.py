"""Copies arrays of the host to a device without waiting."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on a device: on a CPU it shares the array's memory, on a GPU it is a copy.

    The host does not wait for the copy, since it is made from pinned memory. Torch does not use the pinned memory again
    before the copy is finished. The array itself may be changed as soon as this function returns.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

"""What goes from the host's memory to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peclr_dali.pipelines.batch import to_device


def test_a_cpu_shares_the_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = to_device(array, torch.device("cpu"))
    array[1, 2] = 7
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 7]]


@pytest.mark.gpu
def test_the_array_may_change_while_the_gpu_is_busy() -> None:
    """Also when the pinned memory is freed and asked for again before the copies are made."""
    device = torch.device("cuda", 0)
    busy = torch.ones(4096, 4096, device=device)
    array, copies = np.empty(1 << 18, np.int64), []
    for _ in range(20):
        busy = busy @ busy * 1e-4
    for number in range(20):
        array[:] = number
        copies.append(to_device(array, device))
    assert [{copy.min().item(), copy.max().item()} for copy in copies] == [{number} for number in range(20)]

"""What the machine refuses is one line: what needed it, how much, and what to change."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from peclr_dali.errors.refused import as_size, machine_error_line
from peclr_dali.pipelines.loader.buffers import PixelBuffers
from tests.train.tiny_step import exact_step, images, network

HUGE = 2**55


def step_without_memory() -> None:
    def preprocess(image: torch.Tensor) -> torch.Tensor:
        return torch.empty(HUGE, dtype=torch.uint8)

    exact_step(network(), batch=4, micro_batch=2, preprocess=preprocess)(images(4))


def on_a_full_gpu() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 7.62 MiB is"
    )


def raised(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (step_without_memory, r'a training step asked for 32768\.0 TiB, .* Lower train\.micro_batch.*"always"'),
        (lambda: PixelBuffers((HUGE,)).tensor(), r"the loader asked for .* Lower pipelines\.batch"),
        (lambda: np.zeros(HUGE, np.uint8), r"this command asked for 32\.0 PiB, .* Take smaller batches"),
        (lambda: bytearray(HUGE), r"this command asked for more memory"),
        (on_a_full_gpu, r"this command asked for 20\.00 MiB"),
        (raised(RuntimeError("CUDA error: out of memory")), "asked for more memory"),
        (raised(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")), "asked for more memory"),
        (raised(RuntimeError("can't start new thread")), "asked for more memory"),
        (raised(RuntimeError("Resource temporarily unavailable")), "asked for more memory"),  # DALI, starting threads
        (raised(ImportError("libtorch_cpu.so: failed to map segment from shared object")), "asked for more memory"),
        (raised(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), "asked for more memory"),
        (raised(MemoryError()), "asked for more memory"),
    ],
)  # fmt: skip
def test_lack_of_memory_names_the_task_and_the_amount(action: Callable[[], object], said: str) -> None:
    with pytest.raises(Exception) as found:  # noqa: PT011  of many kinds
        action()
    message = machine_error_line(found.value)
    assert message is not None
    assert re.search("^out of memory: .*" + said, message), message


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the loader is closed"), ValueError("out of memory.jpg"), KeyError("x"), ImportError("no apex")],
)
def test_a_defect_is_not_an_error_of_the_machine(error: Exception) -> None:
    assert machine_error_line(error) is None


def test_a_file_is_named_whatever_its_name_says() -> None:
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out of memory.jpg")
    assert machine_error_line(error) == "out of memory.jpg: Permission denied. Check the path and its permissions"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**63, "8388608.0 TiB")],
)
def test_sizes(count: float, text: str) -> None:
    assert as_size(count) == text

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
        (raised(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")), "more memory"),
        (raised(RuntimeError('NVJPEG error "5" : NVJPEG_STATUS_ALLOCATOR_FAILURE 0.jpg')), "more memory"),  # DALI
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
    "text",
    [
        "no kernel image is available for execution on the device",
        "CUDA-capable device(s) is/are busy or unavailable",
        "CUDA driver version is insufficient for CUDA runtime version",
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_line(text: str) -> None:
    message = machine_error_line(torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be reported"))
    assert message is not None
    assert message.startswith("the GPU cannot be used: ")
    assert message.partition(". See nvidia-smi")[0].endswith(text.removeprefix("CUDA-capable ").removeprefix("CUDA "))


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the loader is closed"),
        ValueError("out of memory.jpg"),
        KeyError("x"),
        ImportError("no apex"),
    ],
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

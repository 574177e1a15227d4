"""The cores that this process may use, and its freed memory."""

import ctypes
import math
import os
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h; see mallopt(3)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next image and batch, for the whole process. Only commands do this.

    The decoder allocates memory for each image. The system clears every new page, and each one costs a page fault.
    Other C libraries than glibc have no such function and stay as they are.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, mib in ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 32)):  # 32: the largest
            libc.mallopt(parameter, mib * 2**20)


def available_cores() -> int:
    """Number of cores that this process may use: its CPU affinity, or less if a control group limits its CPU time."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The quota of CPU time of this container's control group (version 2), in cores; infinite if there is none."""
    try:
        quota, period = map(int, file.read_text(encoding="ascii").split())
        return quota / period
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return math.inf

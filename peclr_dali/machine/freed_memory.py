"""Has malloc keep freed memory for the next image and batch, for the whole process. Only commands do this.

The decoder allocates memory for each image. The system clears every new page, and each one costs a page fault.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h; see mallopt(3)


def keep_freed_memory() -> None:
    """Set glibc's thresholds. Other C libraries have no such function and stay as they are."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, mib in ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 32)):  # 32: the largest
            libc.mallopt(parameter, mib * 2**20)

"""Settings of this process and of its worker processes: memory, signals, folder of caches."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import FrameType

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h; see mallopt(3)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next image and batch, for the whole process. Only commands do this.

    The decoder allocates memory for each image. The system clears every new page, and each one costs a page fault.
    Other C libraries than glibc have no such function and stay as they are.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, mib in ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 32)):  # 32: the largest
            libc.mallopt(parameter, mib * 2**20)


def exit_on_sigterm() -> None:
    """Raise `SystemExit` on SIGTERM, so that files, locks and worker processes are cleaned up as after an error."""

    def end(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():  # a pool would wait for their work
            child.terminate()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def start_worker() -> None:
    """Let a process of a pool end silently on Ctrl-C, and with its parent, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def user_cache() -> Path:
    """The folder for files that can be made again: $XDG_CACHE_HOME, or ~/.cache."""
    # A relative one is ignored, as the XDG specification says. Path.home raises for a user without a name.
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache"))  # noqa: PTH111, PTH117

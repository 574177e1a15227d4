"""What this process may use on its machine: cores, memory, signals, ranks, compiled functions."""

from __future__ import annotations

import ctypes
import hashlib
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from peclr_dali.errors import UserError

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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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


class Ranks(NamedTuple):
    """The rank of this process, and the number of ranks. The default is a run of one process.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: processes of the run.
        local_rank: rank among the processes of this machine.
        local_world_size: processes of the run on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def described_ranks(rank: int | None = None, world_size: int | None = None) -> Ranks:
    """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`; one process if they are not set.

    Args:
        rank: used instead of `RANK`.
        world_size: used instead of `WORLD_SIZE`. Give both or neither.

    Raises:
        UserError: the numbers contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise UserError(f"rank = {rank} and world_size = {world_size}: expected both, or none, as under torchrun")
    found = {name: os.environ.get(name.upper(), str(default)) for name, default in Ranks._field_defaults.items()}
    if wrong := [name for name, text in found.items() if not text.isdecimal() or ("size" in name and int(text) == 0)]:
        raise UserError(f"{wrong[0].upper()} = {found[wrong[0]]!r}: expected a number, as torchrun sets it")
    ranks = Ranks(*map(int, found.values()))
    if rank is not None and world_size is not None:
        ranks = ranks._replace(rank=rank, world_size=world_size)
    unnumbered = rank is None and ranks.world_size > 1 and "RANK" not in os.environ  # all would load the same
    if unnumbered or not 0 <= ranks.rank < ranks.world_size:
        where = " (RANK and WORLD_SIZE in the environment)" if rank is None else ""
        raise UserError(
            f"rank = {ranks.rank} and world_size = {ranks.world_size}{where}: expected both, and a rank below the "
            "number of ranks, or neither. Start the processes with torchrun."
        )
    return ranks


F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parents[1]


def cached(njit: Callable[..., Any], **options: Any) -> Callable[[F], F]:
    """Decorator that compiles a function by `numba.njit`, which gets the options.

    The result is kept on disk, if there is a writable folder. Numba drops it when the function's own file changes, but
    functions and constants of other files are compiled into it too. So the name in the cache ends with a fingerprint of
    all files of the function's package.
    """

    def compiled(function: F) -> F:
        file = Path(function.__code__.co_filename)
        if file.is_relative_to(_ROOT):
            function.__qualname__ += _fingerprint(_ROOT / file.relative_to(_ROOT).parts[0])
        try:
            result: F = njit(cache=True, **options)(function)
        except RuntimeError:  # no folder can be written: neither NUMBA_CACHE_DIR, the source's, nor the user's
            result = njit(**options)(function)
        return result

    return compiled


@cache
def _fingerprint(folder: Path) -> str:
    files = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return f"_{hashlib.sha256(b''.join(files)).hexdigest()[:12]}"

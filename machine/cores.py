"""How many cores this process may use."""

from __future__ import annotations

import functools
import logging
import math
import os
from pathlib import Path

from machine.control_groups import groups, read

log = logging.getLogger(__name__)


def available_cores() -> int:
    """Cores that this process may run on, or fewer where a control group limits its CPU time, as containers do."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


@functools.cache
def warn_of_threads(key: str, threads: int, processes_here: int) -> None:
    """Say so, once for each process, where threads are more than twice the cores that they run on.

    Args:
        key: of the configuration that sets them.
        threads: of each process.
        processes_here: that share this machine's cores.
    """
    cores = available_cores()
    if threads * processes_here > 2 * cores:
        in_all = f" in each of {processes_here} processes" if processes_here > 1 else ""
        log.warning(
            "%s = %d%s, on %d core%s: so many threads slow each other down. Leave the key unset, or set it to %d",
            key, threads, in_all, cores, "s" * (cores > 1), max(1, cores // processes_here),
        )  # fmt: skip


def cpu_quota(system: Path = Path("/")) -> float:
    """The lowest quota of CPU time, in cores, of this process's control group and of those above it.

    Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) of Linux's control groups.

    Args:
        system: the root of the file system.

    Returns:
        Infinity if there is no quota, or none that can be read.
    """
    return min((_quota(folder) for folder in groups("cpu", system)), default=math.inf)


def _quota(group: Path) -> float:
    """Cores that one group may use; infinity where its files say nothing, or nothing that can be understood."""
    words = read(group / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        words = [read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):  # -1 is no quota
        return math.inf
    return int(words[0]) / int(words[1])

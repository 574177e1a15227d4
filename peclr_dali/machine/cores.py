"""Counts the cores that this process may use."""

from __future__ import annotations

import functools
import logging
import math
import os
from pathlib import Path

from peclr_dali.machine.control_groups import groups, read

log = logging.getLogger(__name__)


def available_cores() -> int:
    """Number of cores that this process may use: its CPU affinity, or less if a control group limits its CPU time."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


@functools.cache
def warn_of_threads(key: str, threads: int, processes_here: int) -> None:
    """Warn once if there are more than twice as many threads as cores.

    Each of the `processes_here` processes on this machine has this number of threads. `key` is the key of the
    configuration that sets it.
    """
    cores = available_cores()
    if threads * processes_here > 2 * cores:
        in_all = f" in each of {processes_here} processes" if processes_here > 1 else ""
        log.warning(
            "%s = %d%s, on %d core%s: so many threads slow each other down. Leave the key unset, or set it to %d",
            key, threads, in_all, cores, "s" * (cores > 1), max(1, cores // processes_here),
        )  # fmt: skip


def cpu_quota(system: Path = Path("/")) -> float:
    """The lowest quota of CPU time, in cores, among this process's control group and those above it.

    Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) of Linux's control groups.

    It is infinite if there is none, or none that can be read. `system` is the root of the file system.
    """
    return min((_quota(folder) for folder in groups("cpu", system)), default=math.inf)


def _quota(group: Path) -> float:
    """Quota of one group in cores; infinity if its files are missing, set no quota, or cannot be parsed."""
    words = read(group / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        words = [read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):  # -1: no quota
        return math.inf
    return int(words[0]) / int(words[1])

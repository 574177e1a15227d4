"""Counts the cores that this process may use, with the limits of containers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_cores() -> int:
    """Number of cores that this process may use: its CPU affinity, or less if a control group limits its CPU time."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(system: Path = Path("/")) -> float:
    """The lowest quota of CPU time, in cores, among this process's control group and those above it.

    It is infinite if there is none, or none that can be read. `system` is the root of the file system.
    """
    quota = math.inf
    for group in control_groups(system):
        words = read(group / "cpu.max").split()
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):  # else "max"
            quota = min(quota, int(words[0]) / int(words[1]))
    return quota


def control_groups(system: Path) -> Iterator[Path]:
    """Folders of the control groups of Linux (version 2) that limit this process: its own and those above it.

    In a container the process's own group may appear as the root of the tree, although its path is the host's. So the
    root is always included.
    """
    for line in read(system / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            group = PurePosixPath(line.removeprefix("0::"))
            yield from (system / "sys/fs/cgroup" / str(above).lstrip("/") for above in (group, *group.parents))


def read(file: Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

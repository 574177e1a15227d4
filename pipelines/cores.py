"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_cores() -> int:
    """Cores that this process may run on, or fewer where a control group limits its CPU time, as containers do."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(system: Path = Path("/")) -> float:
    """The lowest quota of CPU time, in cores, of this process's control group and of those above it.

    Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) of Linux's control groups. A container may see its own
    group as the root of the tree under a path that is the host's, so the root is looked at in any case.

    Args:
        system: the root of the file system.

    Returns:
        Infinity if there is no quota, or none that can be read.
    """
    return min((_quota(folder) for folder in _groups(system)), default=math.inf)


def _groups(system: Path) -> Iterator[Path]:
    """Folders of the groups that may limit this process."""
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [system / "sys/fs/cgroup", system / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [system / "sys/fs/cgroup" / name for name in (controllers, "cpu")]
        else:
            continue
        group = PurePosixPath(path)
        for mount in mounts:
            yield from (mount / str(above).lstrip("/") for above in (group, *group.parents))


def _quota(group: Path) -> float:
    quota, period = (_read(group / "cpu.max") or "max max").split()
    if quota == "max":
        quota, period = (_read(group / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period"))
    return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else math.inf


def _read(file: Path) -> str:
    """What stands in a file; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from pipelines.control_groups import groups, read


def available_cores() -> int:
    """Cores that this process may run on, or fewer where a control group limits its CPU time, as containers do."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


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
    quota, period = (read(group / "cpu.max") or "max max").split()
    if quota == "max":
        quota, period = (read(group / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period"))
    return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else math.inf

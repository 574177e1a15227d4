"""How many cores this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))

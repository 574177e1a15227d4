"""What a figure was measured on: belongs to every row of bench/results/."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch

from machine.cores import available_cores
from train.runs.folder import versions


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, memory, GPU, versions and commit."""
    found: dict[str, str | int] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return found | versions()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"

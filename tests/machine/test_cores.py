"""How many cores are ours, under quotas of control groups in a made-up file system."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from peclr_dali import machine as cores

V2 = "0::/kubepods/pod7/container3\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {"kubepods/pod7/container3/cpu.max": "150000 100000\n", "kubepods/cpu.max": "max 100000\n"}, 1.5),
        (V2, {"kubepods/pod7/container3/cpu.max": "max 100000\n", "kubepods/pod7/cpu.max": "800000 100000\n"}, 8.0),
        (V2, {"kubepods/pod7/container3/cpu.max": "3200000 100000\n", "kubepods/cpu.max": "400000 100000\n"}, 4.0),
        (V2, {"cpu.max": "50000 100000\n"}, 0.5),  # the container's group is the root of what it sees
        (V2, {"kubepods/pod7/container3/cpu.max": "max 100000\n"}, math.inf),
        (V2, {}, math.inf),
        ("", {}, math.inf),
        ("0:/x\nodd\n", {"cpu.max": "max\n"}, math.inf),
        (V2, {"cpu.max": "garbage 1\n"}, math.inf),
        (V2, {"cpu.max": "100000 0\n"}, math.inf),
    ],
)  # fmt: skip
def test_the_lowest_quota_counts(cgroup: str, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in ({"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{k}": v for k, v in files.items()}).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cores.cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.0, 1), (1.5, 2), (4.0, 4), (64.0, 8), (math.inf, 8)])
def test_a_quota_is_rounded_up_and_limited_by_the_cores(
    quota: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.available_cores() == expected

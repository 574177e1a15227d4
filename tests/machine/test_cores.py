"""How many cores are ours, under the quota of a container."""

import math
import os
from pathlib import Path

import pytest

from peclr_dali import machine as cores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("150000 100000\n", 1.5),
        ("max 100000\n", math.inf),
        ("garbage 1\n", math.inf),
        ("1 0\n", math.inf),
        (None, math.inf),
    ],
)
def test_the_quota_of_a_container(text: str | None, expected: float, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    assert cores.cpu_quota(file) == expected


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.0, 1), (1.5, 2), (4.0, 4), (64.0, 8), (math.inf, 8)])
def test_a_quota_is_rounded_up_and_limited_by_the_cores(
    quota: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.available_cores() == expected

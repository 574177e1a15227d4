"""Whatever lies on the disk: no crash, no hang, no good sample lost, every bad one accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.harness import BACKENDS

ROOT = Path(__file__).parents[2]


def fuzz(*arguments: str, timeout_s: float) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.loader_fuzz", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    counts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    accounted = counts["mutated_used"] + counts["refused_by_structure"] + counts["refused_by_decoder"]
    assert counts["good_used_in_place"] == counts["good"]
    assert accounted == counts["mutated"]
    return counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_hundreds_of_mutated_files(backend: str) -> None:
    counts = fuzz("--mutated", "300", "--good", "100", "--batch", "100", "--backend", backend, timeout_s=400)
    assert counts["refused_by_structure"] > 100
    assert counts["refused_by_decoder"] > 10
    assert counts["mutated_used"] > 30


def test_mutated_files_of_which_regions_are_decoded() -> None:
    counts = fuzz("--mutated", "100", "--good", "30", "--batch", "26", "--large", timeout_s=400)
    assert counts["regions"]
    assert counts["refused_by_structure"] > 25
    assert counts["mutated_used"] > 10


@pytest.mark.slow  # five minutes each
@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_thousand_mutated_files(backend: str) -> None:
    counts = fuzz("--backend", backend, timeout_s=3600)
    assert counts["mutated"] == 10_000
    for kind in ("JPEG", "PNG", "WebP"):
        assert counts[f"refused_{kind}"] > 500

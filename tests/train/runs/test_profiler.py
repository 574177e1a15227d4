from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.meter import profiled


def take_steps(folder: RunFolder, steps: int, *, recorded: int) -> None:
    """Step n computes n additions."""
    with profiled(folder, recorded, torch.device("cpu")) as step_done:
        for step in range(1, steps + 1):
            for _ in range(step):
                torch.ones(3).add(1)
            step_done()


def additions(folder: RunFolder) -> int:
    events = json.loads(gzip.decompress((folder.root / "trace.json.gz").read_bytes()))["traceEvents"]
    return sum(event["name"] == "aten::add" for event in events)


@pytest.mark.parametrize(("steps", "seen"), [(12, 6 + 7 + 8), (8, 6 + 7 + 8), (7, 6 + 7)])
def test_the_steps_after_the_warm_up_are_recorded(tmp_path: Path, steps: int, seen: int) -> None:
    """Those that there are, if the run ends before."""
    folder = RunFolder(tmp_path, keep=1)
    take_steps(folder, steps, recorded=3)
    assert additions(folder) == seen
    (row,) = [line for line in folder.profile_file.read_text().splitlines() if "aten::add" in line]
    assert int(row.split()[-1]) == seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.txt", "trace.json.gz"]

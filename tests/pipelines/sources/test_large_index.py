"""The start of a run's data: what a large index costs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from tests.train.tiny_run import write_images

POSES = 5000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 names in FreiHAND's layout, of 50 files, and their labels."""
    root = tmp_path_factory.mktemp("freihand")
    write_images(root / "files", count=50)
    images = sorted((root / "files").iterdir())
    (root / "training" / "rgb").mkdir(parents=True)
    for number in range(4 * POSES):
        (root / "training" / "rgb" / f"{number:08}.jpg").hardlink_to(images[number % 50])
    (root / "training_xyz.json").write_text(json.dumps([[[0.1234567890123, -1e-3, 1]] * 21] * POSES))
    (root / "training_K.json").write_text(json.dumps([[[480.1, 0, 24], [0, 480.1, 24], [0, 0, 1]]] * POSES))
    return root


def least_cpu_s(*actions: Callable[[], object]) -> list[float]:
    """The least time of a processor that each of some takes; the first of five times may compile the kernel."""
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(5):
        for times, action in zip(found, actions, strict=True):
            before = time.process_time()
            action()
            times.append(time.process_time() - before)
    return [min(times) for times in found]


def test_a_large_index_costs_no_more_than_reading_its_labels(root: Path) -> None:
    """Processor time against processor time: how busy the machine is does not matter."""

    def read() -> None:
        for name in ("xyz", "K"):
            json.loads((root / f"training_{name}.json").read_text())
        assert len(list((root / "training" / "rgb").iterdir())) == 4 * POSES

    index_s, read_s = least_cpu_s(lambda: load_index(DataConfig(root=str(root))), read)
    assert index_s < 2 * read_s


def test_the_index_opens_few_images(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes its time per file, on a network file system above all, is counted rather than timed."""
    looked_at: list[str] = []
    real = os.stat

    def counted(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        looked_at.append(str(path))
        return real(path, *arguments, **options)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and listening:
            looked_at.append(str(arguments[0]))

    listening: list[bool] = []
    sys.addaudithook(heard)  # of every open in Python; there is no way to take it away
    monkeypatch.setattr(os, "stat", counted)  # under every way of asking whether a file is there
    listening.append(True)
    try:
        assert len(load_index(DataConfig(root=str(root)))) == 4 * POSES
    finally:
        listening.clear()
    assert any(name.endswith("training_K.json") for name in looked_at)
    assert sum(name.endswith(".jpg") for name in looked_at) <= 65  # the first, and 64 whose boxes are checked

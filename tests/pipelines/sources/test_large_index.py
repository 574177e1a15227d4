"""The start of a run's data: what a large index and the first batch cost."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.bench.our_loader import our_batches
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from tests.train.tiny_run import write_images

POSES = 5000


def freihand(root: Path, poses: int) -> Config:
    """Four names for each pose in FreiHAND's layout, of 50 files, and labels of that many poses."""
    write_images(root / "files", count=50)
    images = sorted((root / "files").iterdir())
    (root / "training" / "rgb").mkdir(parents=True)
    for number in range(4 * poses):
        (root / "training" / "rgb" / f"{number:08}.jpg").hardlink_to(images[number % 50])
    (root / "training_xyz.json").write_text(json.dumps([[[0.1234567890123, -1e-3, 1]] * 21] * poses))
    (root / "training_K.json").write_text(json.dumps([[[480.1, 0, 112], [0, 480.1, 112], [0, 0, 1]]] * poses))
    return Config(data=(DataConfig(root=str(root)),), pipelines=PipelinesConfig(threads=2))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """20,000 names."""
    return freihand(tmp_path_factory.mktemp("freihand"), POSES)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """200 names."""
    return freihand(tmp_path_factory.mktemp("freihand"), POSES // 100)


def least_cpu_s(*actions: Callable[[], object]) -> list[float]:
    """The least time of a processor that each of some takes; the first of five times may compile the kernel."""
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(5):
        for times, action in zip(found, actions, strict=True):
            before = time.process_time()
            action()
            times.append(time.process_time() - before)
    return [min(times) for times in found]


def test_a_large_index_costs_no_more_than_reading_its_labels(config: Config) -> None:
    """Processor time against processor time: how busy the machine is does not matter."""
    root = Path(config.data[0].root)

    def read() -> None:
        for name in ("xyz", "K"):
            json.loads((root / f"training_{name}.json").read_text())
        assert len(list((root / "training" / "rgb").iterdir())) == 4 * POSES

    index_s, read_s = least_cpu_s(lambda: load_index(config.data), read)
    assert index_s < 2 * read_s


def test_the_first_batch_of_a_large_index_costs_what_that_of_a_small_one_does(config: Config, small: Config) -> None:
    def make(one: Config) -> Callable[[], None]:
        index = load_index(one.data)

        def first() -> None:
            batches = our_batches(index, one, 64, torch.device("cpu"))
            next(batches)
            batches.close()

        return first

    large_s, small_s = least_cpu_s(make(config), make(small))
    assert large_s < 3 * small_s


def test_the_index_opens_few_images(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert len(load_index(config.data)) == 4 * POSES
    finally:
        listening.clear()
    assert any(name.endswith("training_K.json") for name in looked_at)
    assert sum(name.endswith(".jpg") for name in looked_at) <= 65  # the first, and 64 whose boxes are checked

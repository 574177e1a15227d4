"""The start of a run's data: a large index and the first batch are there within seconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.first_batch import as_json, first_batch
from bench.loader import Settings
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.index import Index
from pipelines.sources import load_index
from tests.train.tiny_run import write_images
from train.config import Config

POSES = 5000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """20,000 names in FreiHAND's layout, of 50 files, and labels of that many poses."""
    root = tmp_path_factory.mktemp("freihand")
    write_images(root / "files", count=50)
    images = sorted((root / "files").iterdir())
    (root / "training" / "rgb").mkdir(parents=True)
    for number in range(4 * POSES):
        (root / "training" / "rgb" / f"{number:08}.jpg").hardlink_to(images[number % 50])
    (root / "training_xyz.json").write_text(json.dumps([[[0.1234567890123, -1e-3, 1]] * 21] * POSES))
    (root / "training_K.json").write_text(json.dumps([[[480.1, 0, 112], [0, 480.1, 112], [0, 0, 1]]] * POSES))
    return Config(data=DataConfig(root=str(root)), pipelines=PipelinesConfig(threads=2))


def test_a_large_index_and_its_first_batch_are_there_within_seconds(config: Config) -> None:
    """The best of some: the first may compile the kernel, and a test may have to share its cores."""
    settings = Settings(cores=1, batch=64)
    found = [first_batch(config, settings) for _ in range(3)]
    assert found[0].images == 4 * POSES
    assert min(one.index_s for one in found) + min(one.batch_s for one in found) < 3
    row = json.loads(json.dumps(as_json(found[0], config, settings)))
    assert (row["bench"], row["images"]) == ("first_batch", 4 * POSES)
    assert row["first_batch_s"] > 0


def test_the_index_opens_no_image_but_the_first(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert sum(name.endswith(".jpg") for name in looked_at) <= 1


def test_the_files_are_dropped_from_the_page_cache_first(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def drop(paths: Sequence[Path]) -> None:
        happened.append(f"dropped {len(paths)}")

    def load(data: DataConfig) -> Index:
        happened.append("loaded")
        return load_index(data)

    monkeypatch.setattr("bench.first_batch.drop_from_page_cache", drop)
    monkeypatch.setattr("bench.first_batch.load_index", load)
    first_batch(config, Settings(cores=1, batch=64))
    assert happened == ["loaded", f"dropped {50 + 2}", "loaded"]  # each of the 50 files once, and the labels

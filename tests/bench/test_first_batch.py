"""The start of a run's data: what a large index and the first batch cost."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.loaders.first_batch import first_batch, summary
from bench.loaders.ours import LoaderSettings, our_batches
from errors import UserError
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.samples.index import Index
from pipelines.sources import load_index
from tests.command_line import run_cli
from tests.train.tiny_run import write_images
from train.config.pretraining import Config

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
    return Config(data=DataConfig(root=str(root)), pipelines=PipelinesConfig(threads=2))


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
    assert isinstance(config.data, DataConfig)
    root = Path(config.data.root)

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
            batches = our_batches(index, one, 64)
            next(batches)
            batches.close()

        return first

    large_s, small_s = least_cpu_s(make(config), make(small))
    assert large_s < 3 * small_s


def test_the_row_says_how_long_both_took(config: Config) -> None:
    row = json.loads(json.dumps(first_batch(config, LoaderSettings(cores=1, batch=64))))
    assert (row["bench"], row["images"]) == ("first_batch", 4 * POSES)
    assert row["index_s"] == round(row["index_s"], 2) > 0
    assert row["first_batch_s"] > 0
    assert f"first batch of 64: {row['first_batch_s']:.2f} s more" in summary(row)


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


def test_the_files_are_dropped_from_the_page_cache_first(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def drop(paths: Sequence[Path]) -> None:
        happened.append(f"dropped {len(paths)}")

    def load(data: DataConfig) -> Index:
        happened.append("loaded")
        return load_index(data)

    monkeypatch.setattr("bench.loaders.first_batch.drop_from_page_cache", drop)
    for module in ("first_batch", "ours"):
        monkeypatch.setattr(f"bench.loaders.{module}.load_index", load)
    first_batch(config, LoaderSettings(cores=1, batch=64))
    assert happened == ["loaded", f"dropped {50 + 2}", "loaded"]  # each of the 50 files once, and the labels


@pytest.mark.parametrize("kind", [(), ("--pixels",)])
def test_all_files_of_packed_data_are_dropped(
    kind: tuple[str, ...], small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(small.data, DataConfig)
    assert run_cli("pack", *kind, "--set", f"data.root={small.data.root}", str(tmp_path / "packed")) == 0
    dropped: set[Path] = set()
    monkeypatch.setattr("bench.loaders.first_batch.drop_from_page_cache", dropped.update)
    packed = DataConfig(source="shards", root=str(tmp_path / "packed"))
    first_batch(dataclasses.replace(small, data=packed), LoaderSettings(cores=1, batch=64))
    assert dropped == {file for file in (tmp_path / "packed").rglob("*") if file.is_file()}


def test_data_at_an_address_are_refused() -> None:
    config = Config(data=DataConfig(source="shards", root="s3://bucket/shards"))
    with pytest.raises(UserError, match=r"data\.root = s3://bucket/shards is not on this machine"):
        first_batch(config, LoaderSettings(cores=1, batch=64))

"""Shards at an address: the same batches as from a folder, whatever the network does, and a cache within its bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from pipelines.batch import Batch
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.loader import Loader
from pipelines.samples.index import Index
from pipelines.samples.order import RankSlice, Schedule, build_order
from pipelines.sources import load_index
from pipelines.sources.folder import load_folder
from pipelines.sources.shards.pack import pack
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from tests.pipelines.decoder_fuzz import encoded
from tests.pipelines.sources.bucket import ADDRESS, Bucket, watched

COUNT, PER_SHARD = 120, 10
SHARDS = COUNT // PER_SHARD
GB = 1e9


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve shards of ten noisy images, 140 kB each."""
    root = tmp_path_factory.mktemp("remote")
    (root / "files").mkdir()
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        picture = rng.integers(0, 256, (64, 64, 3), np.uint8)
        (root / "files" / f"{number:03}.png").write_bytes(encoded(Image.fromarray(picture), "PNG"))
    pack(load_folder(DataConfig("folder", str(root / "files"))), root / "packed", per_shard=PER_SHARD, workers=2)
    return root / "packed"


@pytest.fixture
def bucket(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    S3FileSystem.clear_instance_cache()  # connections to the server of an earlier test
    with Bucket(packed) as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


def shard_bytes(packed: Path) -> int:
    return max(file.stat().st_size for file in packed.glob("*.tar")) + 4096


def remote(tmp_path: Path, **options: Any) -> DataConfig:
    return DataConfig("shards", ADDRESS, cache=str(tmp_path / "cache"), **options)


def batches(index: Index, *, steps: int = 14) -> list[Batch]:
    schedule = Schedule(build_order(index, batch=20, seed=3), RankSlice(20, 0, 20), last_step=steps)
    config = PipelinesConfig(backend="opencv", batch=10, threads=2)
    augmentation = Augmentation(GeometryConfig(side_px=16), ColourConfig())
    with Loader(index, schedule, config, augmentation, device=torch.device("cpu")) as loader:
        return list(loader)


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.samples, other.samples)
        assert not len(one.bad)
        for view, expected in zip(one.views, other.views, strict=True):
            assert torch.equal(view.image, expected.image)
            assert torch.equal(view.matrix, expected.matrix)


def test_batches_are_the_same_though_requests_fail(bucket: Bucket, packed: Path, tmp_path: Path) -> None:
    """Two epochs and more, in windows of three shards, in a cache for five: shards go and come again."""
    chance = random.Random(0)
    bucket.fault = lambda name, number: (
        "cut" if (name, number) == ("shard-000004.tar", 1) else "500" if chance.random() < 0.1 else None
    )
    limit = 5 * shard_bytes(packed) + 60_000
    config = remote(tmp_path, shuffle_shards=3, cache_gb=limit / GB)
    with watched(tmp_path) as largest:
        index = load_index(config)
        found = batches(index)
    assert 4 * shard_bytes(packed) < largest() <= limit
    local = load_index(DataConfig("shards", str(packed), shuffle_shards=3))
    assert_same(found, batches(local))
    assert bucket.faults["500"] > 3
    assert bucket.faults["cut"] == 1
    assert index.store is not None
    print(index.store.traffic(), bucket.requests, bucket.faults, largest(), limit)

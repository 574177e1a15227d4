from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from peclr_dali.pipelines.render.settings import samples_in_chunk
from peclr_dali.pipelines.samples.image_sizes import sampled_sizes_px, spread
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.store import JoinedStore, SelectedStore, Store
from peclr_dali.pipelines.sources.shards.shard_store import Shards, ShardStore


def test_the_largest_image_of_a_sample_is_found(tmp_path: Path) -> None:
    names = [f"{number:02}.jpg" for number in range(40)]
    for name in names:
        Image.new("RGB", (64, 48)).save(tmp_path / name)
    index = Index("images", tmp_path, names, np.zeros((40, 3), np.float32))
    assert sampled_sizes_px(index).max(0).tolist() == [48, 64]
    (tmp_path / names[0]).write_bytes(b"not an image")
    (tmp_path / names[20]).unlink()
    assert sampled_sizes_px(index).max(0).tolist() == [48, 64]
    Image.new("RGB", (513, 512)).save(tmp_path / names[39], "PNG")  # whatever its name says
    assert sampled_sizes_px(index).max(0).tolist() == [512, 513]


def test_without_a_readable_image_there_are_no_sizes(tmp_path: Path) -> None:
    index = Index("images", tmp_path, ["missing.jpg"], np.zeros((1, 3), np.float32))
    assert sampled_sizes_px(index).shape == (0, 2)


@pytest.mark.parametrize(
    ("width", "height", "samples"), [(224, 224, 256), (1280, 720, 97), (4032, 3024, 7), (10_000, 10_000, 1)]
)
def test_a_chunk_of_large_images_is_small(width: int, height: int, samples: int) -> None:
    assert samples_in_chunk(width * height) == samples


def test_a_chunk_of_unknown_images_is_as_large_as_one_of_small_images() -> None:
    assert samples_in_chunk(0) == 256


class NearShards(Shards):
    """Shards whose places are looked at, and nothing else."""

    def table(self, name: str) -> Any:
        raise AssertionError(name)

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        raise AssertionError(shard)


class FarShards(NearShards):
    """Shards of which each is downloaded when an image of it is read."""

    is_remote = True


def test_sizes_are_read_at_few_places_of_data_at_an_address() -> None:
    """Whatever is wrapped around the shards: four runs of images, where local data are read all over."""
    tables = {"offset": np.zeros(1000, np.int64), "size": np.zeros(1000, np.int64)}
    far, near = (ShardStore(shards(), [0], tables, verify=False) for shards in (FarShards, NearShards))
    stores: dict[str, tuple[Store | None, int]] = {
        "shards at an address": (far, 4), "some of them": (SelectedStore(far, np.arange(1000)), 4),
        "joined with files": (JoinedStore([near.read, far.read], [None, far], [500, 500]), 4),
        "local shards": (SelectedStore(near, np.arange(1000)), 32), "files": (None, 32),
    }  # fmt: skip
    for name, (store, places) in stores.items():
        boxes_px = np.zeros((1000, 3), np.float32)
        rows = spread(Index(name, Path(), [""] * 1000, boxes_px, store=store), 1000, 32)
        assert len(rows) == 32, name
        assert (np.diff(rows) > 1).sum() + 1 == places, name

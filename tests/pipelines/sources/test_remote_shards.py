"""Shards at an address: the same batches as from a folder, whatever the network does, and a cache within its bound."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.loader.epoch_loader import make_loader
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.remote import address
from peclr_dali.pipelines.sources.remote.address import Remote
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.pipelines.sources.shards.shard_store import ShardStore
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from tests.conftest import Record
from tests.pipelines.decoder_fuzz import encoded
from tests.pipelines.harness import assert_equal, load, loader_of
from tests.pipelines.sources.bucket import ADDRESS, NAME, Bucket, size_on_disk, watched
from tests.train.ranks import finish, start_ranks

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


@pytest.fixture(scope="module")
def server(packed: Path) -> Iterator[Bucket]:
    with closing(Bucket(packed)) as started:
        yield started


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The server without faults, and its environment."""
    S3FileSystem.clear_instance_cache()  # it knows the environment of an earlier test
    server.reset()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peclr_dali.pipelines.sources.remote.address.ATTEMPTS", 3)


def shard_bytes(packed: Path) -> int:
    return max(file.stat().st_size for file in packed.glob("*.tar")) + 4096


def remote(tmp_path: Path, **options: Any) -> DataConfig:
    return DataConfig("shards", ADDRESS, cache=str(tmp_path / "node"), **options)


def batches(index: Index, *, steps: int = 14) -> list[Batch]:
    order = build_order(index, batch=4, seed=3)
    return load(index, batch=4, order=order, last=5 * steps, chunk=4, views="cpu")


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
        assert not len(one.bad)


def test_batches_are_the_same_though_requests_fail(bucket: Bucket, packed: Path, tmp_path: Path) -> None:
    """Two epochs and more, in windows of three shards, in a cache for five: shards go and come again."""
    chance = random.Random(0)
    bucket.fault = lambda name, number: (
        "cut" if (name, number) == ("shard-000004.tar", 1) else "500" if chance.random() < 0.3 else None
    )
    limit = 5 * shard_bytes(packed) + 60_000
    config = remote(tmp_path, shuffle_shards=3, cache_gb=limit / GB)
    with watched(tmp_path / "node") as largest:
        index = load_index(config)
        found = batches(index)
    assert 4 * shard_bytes(packed) < largest() <= limit
    local = load_index(DataConfig("shards", str(packed), shuffle_shards=3))
    assert_same(found, batches(local))
    assert bucket.faults["500"] > 3
    assert bucket.faults["cut"] == 1


def test_two_readers_download_a_shard_once(bucket: Bucket, packed: Path, tmp_path: Path) -> None:
    """Two loaders of the same folder, as two ranks have them: their locks are those of two processes."""
    indices = [load_index(remote(tmp_path)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda index: batches(index, steps=6), indices)
    assert_same(one, other)
    assert {name: count for name, count in bucket.whole.items() if name.endswith(".tar")} == {
        f"shard-{number:06}.tar": 1 for number in range(SHARDS)
    }


def test_everything_that_selects_samples_gives_the_same(bucket: Bucket, packed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    local = DataConfig("shards", str(packed), shuffle_shards=3)
    write_bad_list(bad, {load_index(local).paths[40]: "for a test"}, checked=COUNT)
    chosen: dict[str, Any] = {"label_fraction": 0.6, "bad_list": str(bad)}
    ours = load_index([remote(tmp_path, shuffle_shards=3, **chosen), replace(local, weight=2.0)])
    theirs = load_index([replace(local, **chosen), replace(local, weight=2.0)])
    assert ours.counts == theirs.counts
    assert_same(batches(ours, steps=6), batches(theirs, steps=6))
    assert ours.paths[0].startswith(f"{ADDRESS}/shard-")
    assert str(load_index(remote(tmp_path)).path(3)) == f"{ADDRESS}/shard-000000.tar/000000003.png"


@patch(
    "peclr_dali.pipelines.render.settings.sampled_sizes_px", lambda index: np.array([[64, 64]])
)  # which reads single images
def test_wrong_bytes_are_never_kept(
    bucket: Bucket, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that changed on their way are downloaded again; a shard that is another one ends the run."""
    monkeypatch.setattr(address, "PIECE_BYTES", 50_000)
    name = "shard-000007.tar"
    pieces = -(-(packed / name).stat().st_size // 50_000)
    assert pieces > 2
    bucket.fault = lambda file, number: "changed" if file == name and number == 1 else None
    index = load_index(remote(tmp_path))
    assert_same(batches(index, steps=6), batches(load_index(DataConfig("shards", str(packed))), steps=6))
    assert bucket.requests[name] == 2 * pieces
    assert [file.read_bytes() for file in tmp_path.rglob(name)] == [(packed / name).read_bytes()]

    bucket.fault = lambda file, number: "changed" if file == name else None
    index = load_index(replace(remote(tmp_path), cache=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"packed/shard-000007.tar: .*wrong checksum\), 3 times.* pack again"):
        batches(index, steps=6)
    assert not [*(tmp_path / "other").rglob(name)]
    assert not [*(tmp_path / "other").rglob("*.part")]


def test_a_byte_of_the_cache_that_flips_changes_no_batch(
    bucket: Bucket, packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the shard was verified. Its image is read from the address, and one warning names the file."""
    expected = batches(load_index(DataConfig("shards", str(packed))), steps=30)
    assert_same(batches(load_index(remote(tmp_path)), steps=30), expected)
    assert not caplog.records
    (file,) = tmp_path.rglob("shard-000007.tar")
    with file.open("r+b") as shard:
        offset = int(np.load(packed / "index" / "offset.npy")[7 * PER_SHARD + 3])
        shard.seek(offset + 60)
        (byte,) = shard.read(1)
        shard.seek(offset + 60)
        shard.write(bytes([byte ^ 1]))
    index = load_index(remote(tmp_path))
    assert_same(batches(index, steps=30), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{file}: not the bytes that were downloaded; it is downloaded again" in line
    assert file.read_bytes() == (packed / file.name).read_bytes()


def test_an_image_of_the_index_with_a_wrong_checksum_is_a_bad_file(
    bucket: Bucket, packed: Path, tmp_path: Path
) -> None:
    """Its shard is downloaded a second time, and not again for each such image."""
    index, name = load_index(remote(tmp_path)), "shard-000007.tar"
    assert isinstance(index.store, ShardStore)
    index.store._crc32 = np.zeros(COUNT, np.uint32)
    for row in range(7 * PER_SHARD, 8 * PER_SHARD):
        with pytest.raises(OSError, match="wrong checksum"):
            index.read(row)
    assert bucket.whole[name] == 2


def test_a_full_disk_costs_speed_only(
    bucket: Bucket, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for five shards, of which each batch needs more: they go and come again."""
    room, node = 5 * shard_bytes(packed), tmp_path / "node"
    real, largest = shutil.disk_usage, 0

    def usage(path: Path) -> Any:
        nonlocal largest
        taken = size_on_disk(node)
        largest = max(largest, taken)
        return real(path)._replace(free=room - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    index = load_index(remote(tmp_path))
    assert_same(batches(index, steps=3), batches(load_index(DataConfig("shards", str(packed))), steps=3))
    assert 3 * shard_bytes(packed) < largest <= room
    assert sum(count for name, count in bucket.whole.items() if name.endswith(".tar")) > SHARDS
    limit = time.monotonic() + 120
    while [*tmp_path.rglob("*.part")]:  # a download ends after its request, when the loader is closed
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_disk_that_has_room_again_ends_the_wait(
    bucket: Bucket, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = shutil.disk_usage, Counter[str]()

    def usage(path: Path) -> Any:
        calls["all"] += 1
        return real(path)._replace(free=0) if calls["all"] <= 2 else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    local = load_index(DataConfig("shards", str(packed)))
    assert load_index(remote(tmp_path)).read(70) == local.read(70)
    assert f"no room for {ADDRESS}/shard-000007.tar (the disk is full)" in caplog.text


def test_a_disk_that_stays_full_is_one_line(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run may go on later, so that torchrun restarts it."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("peclr_dali.pipelines.sources.shards.remote_shards.ATTEMPTS", 2)
    index = load_index(remote(tmp_path))
    with pytest.raises(UserError, match=r"data\.cache = .*: no room for s3://.*tar \(the disk is full\)\. Make room"):
        index.read(0)
    assert not [*tmp_path.rglob("*.part")]


def test_a_cache_that_cannot_be_written_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    index = load_index(replace(remote(tmp_path), cache="/proc/nothing"))
    with pytest.raises(UserError, match=r"^data\.cache = /proc/nothing: .*\. Name a folder on a local disk"):
        index.read(0)


def test_a_damaged_index_names_the_address(bucket: Bucket, tmp_path: Path) -> None:
    """It is not kept in the cache, so the user mends it where it is and a cut one there harms nothing."""
    load_index(remote(tmp_path)).read(0)
    kept = {file.name: file for file in (tmp_path / "node").rglob("*") if file.is_file()}
    assert kept.keys() == {".lock", "shard-000000.tar", "shard-000000.tar.lock"}
    (kept["shard-000000.tar"].parent / "index.json").write_text('{"format": 1')
    load_index(remote(tmp_path)).read(0)
    bucket.fault = lambda name, number: "changed" if name == "index.json" else None
    mend = r"Copy the folder of the shards there again, or pack again\."
    with pytest.raises(UserError, match=rf"^{ADDRESS}/index\.json: not a readable index of shards .*\. {mend}$"):
        load_index(remote(tmp_path))
    bucket.fault = lambda name, number: "changed" if name == "size.npy" else None
    with pytest.raises(UserError, match=rf"^{ADDRESS}/index/size\.npy: not the bytes that were packed .*again"):
        load_index(remote(tmp_path))


@pytest.mark.parametrize(("window", "bound_gb"), [(None, 1e-4), (3, 1e-4), (3, 1e-5)])
def test_a_bound_that_is_too_small_names_one_that_is_not(
    bucket: Bucket, packed: Path, tmp_path: Path, window: int | None, bound_gb: float
) -> None:
    """Also one that is smaller than the tables of the index."""
    with pytest.raises(UserError, match=rf"data.cache_gb = {bound_gb:g}: .* needs .* at once") as told:
        load_index(remote(tmp_path, shuffle_shards=window, cache_gb=bound_gb))
    needed = re.search(r"Set data\.cache_gb = ([\d.]+) or more", str(told.value))
    assert needed is not None
    limit = float(needed[1])
    shards = SHARDS if window is None else window + 1
    assert shards * 100_000 < limit * GB <= shards * shard_bytes(packed) + 60_000
    with watched(tmp_path / "node") as largest:
        batches(load_index(remote(tmp_path, shuffle_shards=window, cache_gb=limit)), steps=3)
    assert largest() <= limit * GB


def test_a_server_that_is_gone_is_one_line(bucket: Bucket, tmp_path: Path, few_attempts: None) -> None:
    index = load_index(remote(tmp_path))
    bucket.fault = lambda name, number: "500" if name == "shard-000003.tar" else None
    with pytest.raises(UserError, match=r"s3://images/packed/shard-.*3 attempts failed. Check the network"):
        batches(index)


def test_a_loader_that_waits_for_the_network_can_be_closed(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peclr_dali.pipelines.sources.shards.remote_shards._LOG_EVERY_S", 1)
    index = load_index(remote(tmp_path))
    bucket.fault = lambda name, number: "slow" if name.endswith(".tar") else None
    with patch("peclr_dali.pipelines.render.settings.sampled_sizes_px", return_value=np.array([[64, 64]])):
        loader = loader_of(index, order=build_order(index, batch=20, seed=3), last=None, chunk=10, views="cpu")
    iterator = iter(loader)

    def consume() -> None:
        with pytest.raises(RuntimeError, match="the loader is closed"):
            next(iterator)

    consumer = threading.Thread(target=consume)
    consumer.start()
    while "waiting for s3://images/packed/shard-" not in caplog.text:
        time.sleep(0.01)
    loader.close()
    consumer.join()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"root": "s3://nowhere/packed"}, ["s3://nowhere/packed/index.json", "bucket does not exist", "data.root"]),
        ({"root": f"s3://{NAME}/other"}, [f"s3://{NAME}/other/index.json", "does not exist", "data.root"]),
        ({"root": "s3://me:a-secret@images/packed"}, ["contains a password", "environment"]),
        ({"root": "https://a-token@images/packed"}, ["contains a password", "environment"]),
        ({"root": "s3://"}, ["data.root = s3://: names no bucket", "s3://BUCKET/FOLDER"]),
        ({"root": "s3:///packed"}, ["data.root = s3:///packed: names no bucket"]),
        ({"root": "s3://[images/packed"}, ["data.root = s3://[images/packed", "s3://BUCKET"]),
        ({"root": "nonsense://images/packed"}, ["nonsense://images/packed", "Protocol not known", "s3://BUCKET"]),
        ({"source": "folder"}, ["data.root = 's3://images/packed'", "data.source is 'folder'", "cli.py pack"]),
    ],
)
def test_mistakes_are_one_line(
    bucket: Bucket, tmp_path: Path, changed: dict[str, Any], words: list[str], few_attempts: None
) -> None:
    with pytest.raises(UserError) as told:
        load_index(replace(remote(tmp_path), **changed))
    assert all(word in str(told.value) for word in words), told.value
    assert "a-secret" not in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"AWS_PROFILE": "nobody"}, ["(nobody)", "the credentials", "AWS_PROFILE"]),
        ({"AWS_SECRET_ACCESS_KEY": ""}, ["credentials", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"]),
        ({"AWS_CONFIG_FILE": __file__}, [__file__, "the credentials"]),
        ({"AWS_ENDPOINT_URL": "not-a-url"}, ["not-a-url", "AWS_ENDPOINT_URL"]),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:70000"}, ["http://127.0.0.1:70000", "AWS_ENDPOINT_URL"]),
        ({"AWS_DEFAULT_REGION": "the moon"}, ["the moon", "AWS_DEFAULT_REGION"]),
        ({"AWS_SESSION_TOKEN": "in two\nlines"}, ["the credentials", "in headers", "AWS_SESSION_TOKEN"]),
        ({"AWS_CA_BUNDLE": "/nowhere/ca.pem"}, ["No such file", "AWS_CA_BUNDLE"]),
        ({"AWS_CA_BUNDLE": "/"}, ["Is a directory", "AWS_CA_BUNDLE"]),
        ({"AWS_CA_BUNDLE": __file__}, ["no certificate", "AWS_CA_BUNDLE"]),
        ({"AWS_CA_BUNDLE": "", "REQUESTS_CA_BUNDLE": "/nowhere/ca.pem"}, ["No such file", "REQUESTS_CA_BUNDLE"]),
        ({"root": "s3://my images/packed"}, ["my images", "data.root"]),
    ],
)
def test_wrong_credentials_and_addresses_are_tried_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], words: list[str]
) -> None:
    root = changed.get("root", ADDRESS)
    for name, value in changed.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(address, "wait_s", lambda failed: pytest.fail("tried again") if failed else 0)
    with pytest.raises(UserError) as told:
        load_index(replace(remote(tmp_path), root=root))
    assert all(word in str(told.value) for word in [f"{root}/index.json", *words]), told.value
    assert not bucket.requests


def test_a_token_that_the_server_refuses_is_tried_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GET tells the reason, a HEAD only the status."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    monkeypatch.setattr(address, "wait_s", lambda failed: pytest.fail("tried again") if failed else 0)
    bucket.fault = lambda name, number: "InvalidToken"
    with pytest.raises(
        UserError, match=r"index\.json: OSError: .* Bad Request\. Check data\.root, and the cred.* AWS_SESSION_TOKEN"
    ):
        load_index(remote(tmp_path))
    with pytest.raises(
        UserError, match=r"index\.json: OSError: .* is malformed\. Check data\.root, and the cred.* AWS_SESSION_TOKEN"
    ):
        next(Remote(ADDRESS).pieces("index.json", 2))
    assert bucket.requests["index.json"] == 2


def test_missing_packages_and_credentials_are_one_line(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"NoCredentialsError.* AWS_ACCESS_KEY_ID"):
        load_index(remote(tmp_path))
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"data.root = s3://images/packed: .* pip install 'peclr-dali\[s3\]'"):
        load_index(remote(tmp_path))


KILLED = """
import sys
import numpy as np
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.remote import address
address.PIECE_BYTES = 50_000
index = load_index(DataConfig("shards", sys.argv[1], cache=sys.argv[2]))
prefetch = index.prefetch(lambda: iter([np.arange(len(index))]))
index.read(70)
"""


def test_a_process_killed_within_a_download_leaves_nothing_that_is_read(
    bucket: Bucket, packed: Path, tmp_path: Path
) -> None:
    """By SIGKILL, when half of a shard's second piece has come. The next process downloads this shard anew."""
    name = "shard-000007.tar"
    bucket.fault = lambda file, number: "half" if (file, number) == (name, 2) else None
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, ADDRESS, str(tmp_path / "node")], cwd=Path(__file__).parents[3]
    ) as process:
        while not bucket.faults["half"]:
            time.sleep(0.01)
            assert process.poll() is None
        process.kill()
    (part,) = tmp_path.rglob(f"{name}.part")
    whole = (packed / name).read_bytes()
    left = part.read_bytes()
    assert left[:50_000] == whole[:50_000]
    assert left != whole
    bucket.reset()
    found = batches(load_index(remote(tmp_path)), steps=6)
    assert_same(found, batches(load_index(DataConfig("shards", str(packed))), steps=6))
    assert bucket.whole[name] == 1
    assert [file.read_bytes() for file in tmp_path.rglob(f"{name}*") if file.suffix != ".lock"] == [whole]


def load_rank(config: DataConfig, steps: int, out: str, environment: dict[str, str]) -> None:
    """The batches of one rank, written to a file."""
    os.environ |= environment
    with make_loader(config, batch=4, seed=3, geometry=GeometryConfig(side_px=16), device="cpu") as loader:
        rows: list[Any] = []
        while len(rows) < steps:
            rows += [(batch.samples[:, 0].numpy(), batch.views[0].image.numpy(), len(batch.bad)) for batch in loader]
    torch.save(rows[:steps], f"{out}.{os.environ['RANK']}")


@pytest.mark.slow  # two ranks start, and wait for a server that is away
def test_two_ranks_over_a_failing_network(bucket: Bucket, packed: Path, tmp_path: Path, record: Record) -> None:
    """Nearly a third of the requests fail, a shard is cut, the server is restarted, the cache is small."""
    chance, limit, steps = random.Random(0), 5 * shard_bytes(packed) + 60_000, 120
    bucket.fault = lambda name, number: (
        "cut" if (name, number) == ("shard-000004.tar", 1) else "500" if chance.random() < 0.3 else None
    )
    config = remote(tmp_path, shuffle_shards=3, cache_gb=limit / GB)
    log = tmp_path / "log"
    began = time.monotonic()
    with watched(tmp_path / "node") as largest:
        ranks = start_ranks(2, load_rank, config, steps, str(tmp_path / "found"), bucket.environment, log=log)
        while sum(count for name, count in bucket.whole.items() if name.endswith(".tar")) < SHARDS:
            time.sleep(0.01)
            assert any(rank.is_alive() for rank in ranks), log.read_text()
        bucket.restart(down_s=2)
        finish(ranks, log)
    seconds = time.monotonic() - began
    local = DataConfig("shards", str(packed), shuffle_shards=3)
    finish(start_ranks(2, load_rank, local, steps, str(tmp_path / "local"), {}, log=log), log)
    images = differing = 0
    for rank in range(2):
        found, expected = (torch.load(f"{tmp_path}/{name}.{rank}", weights_only=False) for name in ("found", "local"))
        for (samples, views, bad), (same_samples, same_views, _) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(samples, same_samples)
            assert not bad
            images += len(views)
            differing += int((views != same_views).any(axis=(1, 2, 3)).sum())
    assert images == 4 * steps
    assert not differing
    assert 4 * shard_bytes(packed) < largest() <= limit
    assert bucket.faults["cut"] == 1
    assert bucket.faults["500"] > 15
    record(
        "remote_shards", ranks=2, images=images, shards=SHARDS, shard_bytes=shard_bytes(packed), bound_bytes=limit,
        largest_bytes=largest(), requests=bucket.requests.total(), faults=dict(bucket.faults),
        restarts=bucket.restarts, seconds=round(seconds, 1), differing_images=differing,
    )  # fmt: skip

"""The cache of a machine and the plan of its downloads, without a network."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.sources.remote.cache import Cache, NoRoom, WrongBytes
from peclr_dali.pipelines.sources.shards.remote_shards import coming_shards
from peclr_dali.pipelines.sources.shards.shard_store import Descriptor

BLOCK = 4096
ROOT = Path(__file__).parents[3]


def add(cache: Cache, name: str, blocks: int = 1, before: float = math.inf) -> bool:
    data = name[-1].encode() * (blocks * BLOCK)
    return cache.add(name, len(data), [data], hashlib.sha256(data).hexdigest(), before)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*") if file.is_file()} - {file.name for file in folder.rglob("*.lock")}


def test_the_file_that_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 4 * BLOCK)
    for name in ("x.shards/a", "x.shards/b", "x.shards/c", "y.shards/d"):
        assert add(cache, name)
    assert cache.use("x.shards/a")
    assert add(cache, "x.shards/e", 2)
    assert names(tmp_path) == {"a", "d", "e"}
    assert not cache.use("x.shards/b")


def test_nothing_is_removed_for_a_file_that_does_not_fit(tmp_path: Path) -> None:
    """Because it is too large, or because the others were used lately."""
    cache = Cache(tmp_path, 3 * BLOCK)
    for name in "abc":
        add(cache, f"x.shards/{name}")
    with pytest.raises(NoRoom):
        add(cache, "x.shards/d", 4)
    now = time.time_ns()
    for name in "bc":
        cache.use(f"x.shards/{name}")
    add(cache, "x.shards/d", before=now)
    assert names(tmp_path) == {"b", "c", "d"}
    with pytest.raises(NoRoom, match=r"the bound data\.cache_gb is reached"):
        add(cache, "x.shards/e", before=now)
    assert names(tmp_path) == {"b", "c", "d"}


def test_only_files_of_the_cache_count_each_in_whole_blocks(tmp_path: Path) -> None:
    """Under another bound than before, too: it holds from the next file on."""
    (tmp_path / "thesis.tex").write_bytes(bytes(9 * BLOCK))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard.tar").write_bytes(bytes(9 * BLOCK))
    for name in "abcd":
        Cache(tmp_path, 4 * BLOCK).add(f"x.shards/{name}", 1, [b"!"], None, math.inf)
    add(Cache(tmp_path, 2 * BLOCK), "x.shards/e")
    assert names(tmp_path) == {"thesis.tex", "shard.tar", "d", "e"}


def test_one_writes_and_nobody_reads_a_part(tmp_path: Path) -> None:
    one, other = Cache(tmp_path, 4 * BLOCK), Cache(tmp_path, 4 * BLOCK)

    def pieces() -> Iterator[bytes]:
        assert not add(other, "x.shards/a", 2)
        assert not other.use("x.shards/a")
        with pytest.raises(NoRoom):  # its room is taken from the beginning
            add(other, "x.shards/b", 3)
        assert names(tmp_path) == {"a.part"}
        yield b"a" * BLOCK
        assert not other.use("x.shards/a")
        yield b"a" * BLOCK

    one.add("x.shards/a", 2 * BLOCK, pieces(), None, math.inf)
    assert other.use("x.shards/a")
    assert other.add("x.shards/a", 2 * BLOCK, [b"not read"], None, math.inf)
    assert (tmp_path / "x.shards/a").read_bytes() == b"a" * 2 * BLOCK
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("fault", ["checksum", "error"])
def test_what_is_not_whole_is_removed(tmp_path: Path, fault: str) -> None:
    """And its lock ends, also where the error is kept, as a notebook does."""
    cache = Cache(tmp_path, 4 * BLOCK)

    def pieces() -> Iterable[bytes]:
        yield b"a" * BLOCK
        if fault == "error":
            raise KeyboardInterrupt

    with pytest.raises((WrongBytes, KeyboardInterrupt)) as kept:
        cache.add("x.shards/a", BLOCK, pieces(), hashlib.sha256(b"b" * BLOCK).hexdigest(), math.inf)
    assert not names(tmp_path)
    for lock in (".lock", "x.shards/a.lock"):
        FileLock(tmp_path / lock).acquire(timeout=0).lock.release()
    assert kept.traceback
    assert add(cache, "x.shards/a")


def test_a_killed_writer_leaves_a_part_that_is_never_read(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from peclr_dali.pipelines.sources.remote.cache import Cache
cache = Cache(Path({str(tmp_path)!r}), {4 * BLOCK})
def pieces(name):
    yield b"!" * {BLOCK}
    if name == "a":
        cache.add("x.shards/b", {2 * BLOCK}, pieces("b"), None, 0.0)
    print("half", flush=True)
    sys.stdin.read()
cache.add("x.shards/a", {2 * BLOCK}, pieces("a"), None, 0.0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        cache = Cache(tmp_path, 4 * BLOCK)
        assert not add(cache, "x.shards/a", 2)
        with pytest.raises(NoRoom):
            add(cache, "x.shards/c")
        writer.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {"a.part", "b.part"}
    assert not cache.use("x.shards/a")
    assert add(cache, "x.shards/a", 2)
    assert (tmp_path / "x.shards/a").read_bytes() == b"a" * 2 * BLOCK
    assert add(cache, "x.shards/c")
    assert names(tmp_path) == {"a", "c"}


def test_a_forked_process_keeps_no_lock(tmp_path: Path) -> None:
    """DataLoader's workers, say: a fork copies the descriptors of all threads, as dup does."""
    cache, copies = Cache(tmp_path, BLOCK), list[int]()

    def pieces() -> Iterator[bytes]:
        here = [file for file in Path("/proc/self/fd").iterdir() if os.path.realpath(file).endswith("/a.lock")]
        copies.extend(os.dup(int(file.name)) for file in here)
        yield b"a" * BLOCK

    cache.add("x.shards/a", BLOCK, pieces(), None, math.inf)
    assert len(copies) == 1
    (tmp_path / "x.shards/a").unlink()
    assert add(cache, "x.shards/a")
    for copy in copies:
        os.close(copy)


def test_a_reader_can_finish_a_file_that_is_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, BLOCK)
    add(cache, "x.shards/a")
    opened = Descriptor(tmp_path / "x.shards/a")
    add(cache, "x.shards/b")
    assert names(tmp_path) == {"b"}
    assert os.pread(opened.number, BLOCK, 0) == b"a" * BLOCK


def test_a_full_disk_makes_room_or_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, 9 * BLOCK)
    add(cache, "x.shards/a")
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0))
    with pytest.raises(NoRoom, match="the disk is full"):
        add(cache, "x.shards/b", before=0)
    with pytest.raises(NoRoom, match="the disk is full"):
        add(cache, "x.shards/b", 2)
    assert names(tmp_path) == {"a"}
    add(cache, "x.shards/b")
    assert names(tmp_path) == {"b"}
    monkeypatch.undo()

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="the disk is full"):
        add(cache, "x.shards/c")
    assert names(tmp_path) == {"b"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_plan_has_the_shards_of_the_coming_steps_in_the_order_of_use(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 6))
    step = st.lists(st.integers(0, shards - 1), min_size=1, max_size=5)
    steps = data.draw(st.lists(step, min_size=1, max_size=30))
    least = data.draw(st.integers(1, shards))
    coming = coming_shards(map(np.array, steps), shards=least, rows=10**6)
    for done in range(len(steps)):
        expected = [*dict.fromkeys(shard for one in steps[done:] for shard in one)]
        near = next(coming)
        assert near == expected[: len(near)]
        assert len(near) >= min(least, len(expected))
    assert next(coming) == next(coming) == []


def test_a_plan_without_end_looks_ahead_over_an_epoch_at_most() -> None:
    looked = 0

    def endless() -> Iterator[IntArray]:
        nonlocal looked
        while True:
            looked += 1
            yield np.zeros(10, np.int64)

    coming = coming_shards(endless(), shards=2, rows=100)
    assert next(coming) == [0]
    assert looked == 10
    assert next(coming) == [0]
    assert looked == 11

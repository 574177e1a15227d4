"""The cache of a node and the plan of its downloads, without a network."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from pipelines.arrays import IntArray
from pipelines.sources.remote import prefetch
from pipelines.sources.remote.cache import Descriptor, NodeCache, NoRoom, UnfinishedFile
from pipelines.sources.remote.prefetch import STEPS_UNDER_WAY, Prefetcher, ShardUses

BLOCK = 4096
ROOT = Path(__file__).parents[3]


def never(name: str) -> float:
    return float("inf")


def add(cache: NodeCache, name: str, blocks: int = 1, next_use: dict[str, int] | None = None) -> Descriptor:
    part = started(cache, name, blocks, next_use)
    cache.write(part, name[-1].encode() * (blocks * BLOCK), 0)
    return cache.finish(part)


def started(cache: NodeCache, name: str, blocks: int = 1, next_use: dict[str, int] | None = None) -> UnfinishedFile:
    part = cache.start(name, blocks * BLOCK, never if next_use is None else lambda one: next_use.get(one, never(one)))
    assert part is not None
    return part


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*") if file.is_file()} - {"lock"}


def test_the_file_that_is_used_last_goes_first(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 4 * BLOCK)
    uses = {f"x.shards/{name}": steps for name, steps in (("a", 3), ("b", 9), ("c", 5), ("e", 4), ("f", 9))}
    for name in "abc":
        add(cache, f"x.shards/{name}", next_use=uses)
    add(cache, "y.shards/d")  # nothing is known of it
    add(cache, "x.shards/e", next_use=uses)
    assert names(tmp_path) == {"a", "b", "c", "e"}
    held = cache.open("x.shards/b")
    with pytest.raises(NoRoom):  # b is in use, and all others are needed sooner
        cache.start("x.shards/f", BLOCK, lambda name: uses.get(name, 0))
    assert names(tmp_path) == {"a", "b", "c", "e"}
    del held
    add(cache, "x.shards/g", next_use={**uses, "x.shards/g": 1})
    assert names(tmp_path) == {"a", "c", "e", "g"}


def test_nothing_is_removed_for_a_file_that_does_not_fit(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 4 * BLOCK)
    add(cache, "x.shards/a")
    held = add(cache, "x.shards/b", blocks=2)
    with pytest.raises(NoRoom):
        cache.start("x.shards/c", 3 * BLOCK, never)
    assert names(tmp_path) == {"a", "b"}
    assert os.pread(held.number, 9, 0) == b"b" * 9


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_bytes(bytes(9 * BLOCK))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard.tar").write_bytes(bytes(9 * BLOCK))
    cache = NodeCache(tmp_path, BLOCK)
    add(cache, "x.shards/a")
    add(cache, "x.shards/b")
    assert names(tmp_path) == {"thesis.tex", "shard.tar", "b"}


def test_one_writes_and_nobody_reads_a_part(tmp_path: Path) -> None:
    one, other = NodeCache(tmp_path, 4 * BLOCK), NodeCache(tmp_path, 4 * BLOCK)
    part = started(one, "x.shards/a", 2)
    assert other.start("x.shards/a", 2 * BLOCK, never) is None
    assert other.open("x.shards/a") is None
    with pytest.raises(NoRoom):  # its room is taken from the beginning
        other.start("x.shards/b", 3 * BLOCK, never)
    assert names(tmp_path) == {"a.part"}
    one.write(part, b"a" * 2 * BLOCK, 0)
    assert other.open("x.shards/a") is None
    one.finish(part)
    assert other.start("x.shards/a", 2 * BLOCK, never) is None  # it is there
    assert names(tmp_path) == {"a"}
    assert other.open("x.shards/a") is not None


def test_a_killed_writer_leaves_a_part_that_is_never_read(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from typing import cast
from pipelines.sources.remote.cache import NodeCache
cache = NodeCache(Path({str(tmp_path)!r}), {4 * BLOCK})
for name in "ab":
    part = cache.start("x.shards/" + name, {2 * BLOCK}, lambda name: 0.0)
    cache.write(part, b"!" * {BLOCK}, 0)
    globals()[name] = part
print("half", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        cache = NodeCache(tmp_path, 4 * BLOCK)
        assert cache.start("x.shards/a", 2 * BLOCK, never) is None
        with pytest.raises(NoRoom):
            cache.start("x.shards/c", BLOCK, never)
        writer.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {"a.part", "b.part"}
    assert cache.open("x.shards/a") is None
    held = add(cache, "x.shards/a", 2)
    assert os.pread(held.number, 4 * BLOCK, 0) == b"a" * 2 * BLOCK
    add(cache, "x.shards/c")
    assert names(tmp_path) == {"a", "c"}


def test_an_error_that_is_kept_keeps_no_lock(tmp_path: Path) -> None:
    """As a notebook keeps the last one: its traceback holds what the failing call had opened."""
    cache = NodeCache(tmp_path, 2 * BLOCK)
    held = add(cache, "x.shards/a")
    add(cache, "x.shards/b")
    with pytest.raises(NoRoom) as kept:
        cache.start("x.shards/c", 2 * BLOCK, never)
    for name in ("lock", "x.shards/b"):
        with Path(tmp_path, name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert kept.traceback
    assert held.number


def test_a_forked_process_keeps_no_lock(tmp_path: Path) -> None:
    """DataLoader's workers, say: a fork copies the descriptors of all threads, as dup does."""
    cache = NodeCache(tmp_path, BLOCK)
    held = add(cache, "x.shards/a")
    with cache._locked():
        here = [file for file in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(file)]
        copies = [os.dup(int(file.name)) for file in here]
    assert len(copies) == 2
    del held
    add(cache, "x.shards/b")
    assert names(tmp_path) == {"b"}
    for copy in copies:
        os.close(copy)


def test_a_file_that_is_removed_while_it_is_opened_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its bytes are free at once, though it is open."""
    cache = NodeCache(tmp_path, BLOCK)
    add(cache, "x.shards/a")
    real, opened = Descriptor.of, list[Descriptor]()

    def of(path: Path, flags: int = os.O_RDONLY) -> Descriptor:
        monkeypatch.undo()
        opened.append(real(path, flags))
        add(cache, "x.shards/b")
        return opened[0]

    monkeypatch.setattr(Descriptor, "of", of)
    assert cache.open("x.shards/a") is None
    assert os.fstat(opened[0].number).st_blocks == 0
    assert names(tmp_path) == {"b"}


def test_a_lower_bound_removes_the_oldest_files_that_nobody_uses(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 4 * BLOCK)
    used = add(cache, "x.shards/a")
    for age, name in enumerate(("b", "c", "d")):
        add(cache, f"x.shards/{name}")
        os.utime(tmp_path / "x.shards" / name, (age, age))
    NodeCache(tmp_path, 2 * BLOCK).trim()
    assert names(tmp_path) == {"a", "d"}
    assert used.number


def test_files_count_in_whole_blocks(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 2 * BLOCK)
    for name in "abc":
        part = cache.start(f"x.shards/{name}", 1, never)
        assert part is not None
        cache.finish(part)
    assert len(names(tmp_path)) == 2


def test_a_full_disk_makes_room_or_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(tmp_path, 9 * BLOCK)
    add(cache, "x.shards/a")
    real = os.posix_fallocate

    def always_full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", always_full)
    held = cache.open("x.shards/a")
    with pytest.raises(NoRoom, match="the disk is full"):
        cache.start("x.shards/b", BLOCK, never)
    assert names(tmp_path) == {"a"}
    del held
    calls = iter([OSError(errno.ENOSPC, "full"), None])

    def once_full(descriptor: int, offset: int, size: int) -> None:
        if (error := next(calls)) is not None:
            raise error
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", once_full)
    add(cache, "x.shards/b")
    assert names(tmp_path) == {"b"}


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(UserError, match=r"data\.cache = /proc/cache: .* local disk"):
        NodeCache(Path("/proc/cache"), BLOCK).start("x.shards/a", 1, never)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_plan_knows_every_next_use(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 6))
    step = st.lists(st.integers(0, shards - 1), min_size=1, max_size=5)
    steps = data.draw(st.lists(step, min_size=1, max_size=30))
    window = data.draw(st.integers(1, shards))
    plan = ShardUses((np.array(one) for one in steps), shards=shards, rows=10**6, window=window)
    for done in range(len(steps)):
        expected: dict[int, int] = {}
        for later, one in enumerate(steps[done:]):
            for shard in one:
                expected.setdefault(shard, later)
        assert plan.next_uses() == expected
        assert list(plan.next_uses()) == list(expected)
        plan.done()


def test_near_are_two_windows_and_the_steps_under_way() -> None:
    steps = [np.array([shard] * 10) for shard in range(40)]
    plan = ShardUses(iter(steps), shards=40, rows=400, window=6)
    assert plan.near() == list(range(12))
    plan.done()
    assert plan.near() == list(range(1, 13))
    plan = ShardUses(iter(steps), shards=40, rows=400, window=1)
    assert plan.near() == list(range(STEPS_UNDER_WAY))


def test_a_plan_of_few_rows_fetches_nothing() -> None:
    def steps(count: int) -> list[IntArray]:
        return [np.arange(10)] * count

    assert ShardUses(iter(steps(1)), shards=10, rows=1000, window=2).near() == []
    assert ShardUses(iter(steps(10)), shards=10, rows=1000, window=2).near() != []


def test_a_plan_without_end_looks_ahead_over_two_epochs_at_most() -> None:
    looked = 0

    def endless() -> Iterator[IntArray]:
        nonlocal looked
        while True:
            looked += 1
            yield np.zeros(10, np.int64)

    ShardUses(endless(), shards=2, rows=100, window=1)
    assert looked == 20


def test_shards_are_fetched_in_the_order_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes a step at a time gets each shard, and one downloader fetches them in this order."""
    order = np.random.default_rng(0).permutation(40).tolist()
    fetched: list[int] = []

    def fetch(shard: int, next_uses: dict[int, int], closed: threading.Event) -> Descriptor:
        fetched.append(shard)
        return cast(Descriptor, shard)

    monkeypatch.setattr(prefetch, "DOWNLOADS", 1)
    steps = (np.array([shard] * 10) for shard in order)
    prefetcher = Prefetcher(lambda: ShardUses(steps, shards=40, rows=400, window=6), fetch, str)
    try:
        for shard in order:
            while (found := prefetcher.get(shard)[0]) is None:  # this reader may be far ahead of the downloader
                time.sleep(0.001)
            assert found == shard
            prefetcher.done()
    finally:
        prefetcher.close()
    assert fetched == order

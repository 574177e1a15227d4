"""Shards at an address: downloaded whole into a cache, the next ones ahead of their use."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Final

from peclr_dali.errors import UserError
from peclr_dali.machine.process import user_cache
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.store import Prefetch, Steps
from peclr_dali.pipelines.sources.remote.address import ATTEMPTS, Remote, wait_s
from peclr_dali.pipelines.sources.remote.cache import FOLDER_ENDING, Cache, NoRoom, WrongBytes, on_disk
from peclr_dali.pipelines.sources.shards.index_file import INDEX_FILE, Table, parse_index_file, read_table, table_name
from peclr_dali.pipelines.sources.shards.shard_store import Descriptor, Shards, read_at

log = logging.getLogger(__name__)

_DOWNLOADS: Final = 8
"""Shards that a process downloads at once."""

_LOG_EVERY_S: Final = 10


class _Address(PosixPath):
    """An address as the root of an index. Its text keeps both slashes of "s3://"; a path would merge them."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


class RemoteShards(Shards):
    """Shards of a folder at an address.

    Raises:
        UserError: they cannot be read from there, or the cache's bound is smaller than what is needed at once.
    """

    is_remote = True

    def __init__(self, config: DataConfig) -> None:
        self._remote, self.folder = Remote(config.root), _Address(config.root)
        data = self._remote.read(INDEX_FILE)
        copy_again = "Copy the folder of the shards there again, or pack again."
        self.content = parse_index_file(data, f"{self.folder / INDEX_FILE}", copy_again)
        if self.content.is_foreign:
            raise UserError(
                f"data.root = {config.root}: is an index of shards of other programs, which are read from a folder "
                "only: it has no checksums of them. Pack the data with 'python cli.py pack'."
            )
        shards = self.content.shards
        folder = user_cache() / "peclr-dali" / "shards" if config.cache is None else Path(config.cache)
        # Data that were packed again have another key, so they never meet older files.
        key = hashlib.sha256(f"{self._remote.address} {hashlib.sha256(data).hexdigest()}".encode()).hexdigest()[:16]
        label = re.sub(r"[^\w.-]", "_", self._remote.address.rpartition("/")[2])[:40]
        self._cached = [f"{label}-{key}{FOLDER_ENDING}/{shard.file}" for shard in shards]
        self._cache = Cache(folder, int(config.cache_gb * 1e9))
        self._window = min(config.shuffle_shards or len(shards), len(shards))
        sizes = sorted((on_disk(shard.bytes) for shard in shards), reverse=True)
        self._most = self._cache.limit // sizes[0]  # shards that are in the cache at once
        # One more than a window: the next shard comes while the last images of the window are read.
        needed = sum(sizes[: self._window + 1])
        if needed > self._cache.limit:
            window = config.shuffle_shards
            several = f"{window} shards (data.shuffle_shards) and one more" if window else "all shards"
            raise UserError(
                f"data.cache_gb = {config.cache_gb:g}: {self._remote.address} needs {several} at once. Set "
                f"data.cache_gb = {math.ceil(needed / 10**4) / 10**5} or more, or a smaller data.shuffle_shards."
            )
        self._damaged = set[int]()  # by the disk, and downloaded again
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="download")
        self._started: dict[int, Future[None]] = {}

    def table(self, name: str) -> Table:
        """See `Shards`. The table is in memory."""
        file = table_name(name)
        return read_table(self.folder / file, name, self.content, self._remote.read(file))

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """See `Shards`. Waits until the shard is downloaded.

        Raises:
            UserError: it cannot be downloaded.
            RuntimeError: the loader was closed meanwhile.
        """
        file = self._cache.folder / self._cached[shard]
        while True:
            try:
                self._cache.use(self._cached[shard])
                return read_at(Descriptor(file), offset, size, crc32, file.name)
            except FileNotFoundError:
                self._wait_for(shard)
            except OSError as error:  # without a number: the bytes are wrong
                is_damaged = error.errno in (None, errno.EIO) and offset + size <= self.content.shards[shard].bytes
                if not is_damaged or shard in self._damaged:
                    raise
                self._damaged.add(shard)
                log.warning("%s: not the bytes that were downloaded; it is downloaded again. Check the disk", file)
                file.unlink(missing_ok=True)

    def _wait_for(self, shard: int) -> None:
        if self._stop.is_set():  # an earlier loader's
            self._stop = threading.Event()
        stop = self._stop
        for seconds in itertools.count(1):
            try:
                self._start(shard, math.inf, stop).result(timeout=1)
                break
            except (TimeoutError, CancelledError):
                if stop.is_set():  # and not that of another loader, which had begun the download
                    raise RuntimeError("the loader is closed") from None
            if seconds % _LOG_EVERY_S == 0:
                log.warning("waiting for %s for %d s", self.folder / self.content.shards[shard].file, seconds)

    def _start(self, shard: int, before: float, stop: threading.Event) -> Future[None]:
        """Begin to download a shard, if that is not under way."""
        with self._lock:
            if shard not in self._started or self._started[shard].done():
                self._started[shard] = self._pool.submit(self._download, shard, before, stop)
            return self._started[shard]

    def _download(self, number: int, before: float, stop: threading.Event) -> None:
        """Download a shard that is not there, or wait until another process has done so.

        Args:
            before: see `Cache.add`. If it is finite and there is no room, nothing happens.
            stop: ends this before the next request.
        """
        shard = self.content.shards[number]
        where = self.folder / shard.file
        for failed in range(ATTEMPTS):
            if stop.wait(wait_s(failed)):
                raise CancelledError
            pieces = self._remote.pieces(shard.file, shard.bytes, stop)
            try:
                while not self._cache.add(self._cached[number], shard.bytes, pieces, shard.sha256, before):
                    if stop.wait(0.1):
                        raise CancelledError
                return
            except WrongBytes as error:
                what = f"{where}: not the bytes that were packed (wrong checksum)"
                if failed == 2:
                    raise UserError(f"{what}, 3 times. Copy it there again, or pack again.") from error
            except NoRoom as error:
                what = f"data.cache = {self._cache.folder}: no room for {where} ({error})"
                if before < math.inf:
                    return
            log.warning("%s; attempt %d of %d", what, failed + 1, ATTEMPTS)
        raise UserError(f"{what}. Make room, raise data.cache_gb, or name another folder.")

    def prefetch(self, steps: Steps) -> Prefetch:
        """See `Shards`. After `close`, a download ends with the request that is under way."""
        self._stop = stop = threading.Event()
        coming = coming_shards(steps(), shards=2 * self._window, rows=self.content.samples)

        def fetch_ahead() -> None:
            """Begin to download the first of the coming shards that are not there. The others count as used now."""
            now = time.time_ns()
            near = reversed(next(coming)[: self._most])  # so that the one that is needed first is used last
            missing = [shard for shard in near if not self._cache.use(self._cached[shard])]
            for shard in missing[: -_DOWNLOADS - 1 : -1]:
                self._start(shard, now, stop)

        fetch_ahead()
        return Prefetch(fetch_ahead, stop.set)


def coming_shards(steps: Iterator[IntArray], *, shards: int, rows: int) -> Iterator[list[int]]:
    """Yield before each step the shards of the coming steps, in the order of their use.

    Args:
        steps: the shards (N,) of the rows of each step.
        shards: number of shards to look for, in the coming `rows` at most.
    """
    coming: deque[tuple[int, dict[int, None]]] = deque()  # number of rows and the shards of each step
    while True:
        near = dict.fromkeys(shard for _, used in coming for shard in used)
        seen = sum(count for count, _ in coming)
        while seen < rows and len(near) < shards and (step := next(steps, None)) is not None:
            coming.append((len(step), dict.fromkeys(step.tolist())))
            near |= coming[-1][1]
            seen += len(step)
        yield [*near]
        if coming:
            coming.popleft()

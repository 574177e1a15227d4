"""Shards at an address: downloaded into the node's cache, or read image by image if few of their images are used."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import resource
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from errors import UserError
from machine.user_cache import user_cache
from pipelines.config import DataConfig
from pipelines.samples.store import Follower, Steps, Traffic
from pipelines.sources.remote.address import READ_BYTES, READS, Remote, Stopped
from pipelines.sources.remote.cache import FOLDER_ENDING, Descriptor, NodeCache, NoRoom, bytes_on_disk
from pipelines.sources.remote.prefetch import STEPS_UNDER_WAY, Prefetcher, ShardUses
from pipelines.sources.shards.index_file import INDEX_FILE, shards_in_words, table_name
from pipelines.sources.shards.shard_store import Shards, read_at

log = logging.getLogger(__name__)

_WAIT_S: Final = 0.1

_OTHER_FILES: Final = 512
"""Open files of a process besides the shards that it holds."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    """CRC-32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: bytes, /) -> None:
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


@dataclass(frozen=True)
class _File:
    """A file of the folder: its size in bytes, and its SHA-256, or the CRC-32 of a table; None: not known."""

    name: str
    size: int
    checksum: str | None

    def hash(self) -> _Hash:
        return _Crc32() if self.checksum is not None and len(self.checksum) == 8 else hashlib.sha256()


class RemoteFolder:
    """The folder of shards at `data.root`, with a folder in the node's cache for its files.

    Each content of index.json has a folder of its own in the cache, so data that were packed again never meet older
    files.

    Attributes:
        path: the cache's folder; it holds index.json, and the tables after `fetch_tables`.

    Raises:
        UserError: index.json cannot be downloaded or stored.
    """

    def __init__(self, config: DataConfig) -> None:
        self.remote = Remote(config.root)
        folder = user_cache() / "peclr-dali" / "shards" if config.cache is None else Path(config.cache)
        self.cache = NodeCache(folder, int(config.cache_gb * 1e9))
        content = self.remote.read_all(INDEX_FILE)
        digest = hashlib.sha256(content)
        key = hashlib.sha256(self.remote.address.encode() + digest.digest()).hexdigest()[:16]
        label = re.sub(r"[^\w.-]", "_", self.remote.address.rpartition("/")[2])[:40]
        self.name = f"{label}-{key}{FOLDER_ENDING}"
        self.path = self.cache.path(self.name)
        self.bytes = 0  # from the network
        self._lock = threading.Lock()
        self.cache.trim()
        self._index = [_File(INDEX_FILE, len(content), digest.hexdigest())]
        self._kept = [self._wait_for(self._index[0])]  # as long as this lives

    def find_tables(self, content: dict[str, Any]) -> None:
        """Find the sizes of the tables that index.json names. Errors as in `Remote.read`."""
        sums: dict[str, int] = content.get("crc32", {})
        for table in content["tables"]:
            name = table_name(table)
            held = self.cache.open(f"{self.name}/{name}")
            size = self.remote.size(name) if held is None else os.fstat(held.number).st_size
            self._index.append(_File(name, size, f"{sums[table]:08x}" if table in sums else None))

    def fetch_tables(self) -> None:
        """Download the tables that `find_tables` found, as far as they are not in the cache, and keep them there."""
        self._kept += [self._wait_for(file) for file in self._index[1:]]

    def index_bytes(self) -> int:
        """Bytes in the cache of index.json and the tables that were found."""
        return sum(bytes_on_disk(file.size) for file in self._index)

    def _wait_for(self, file: _File) -> Descriptor:
        """Download a file, or wait until another process has done so."""
        try:
            while (found := self.fetch(file, {})) is None:
                time.sleep(_WAIT_S)
        except NoRoom as error:
            raise UserError(
                f"data.cache = {self.cache.folder}: no room for {file.name} of {self.remote.address} ({error}). Make "
                "room, raise data.cache_gb, or name another folder."
            ) from error
        return found

    def fetch(self, file: _File, next_uses: dict[str, int], stop: threading.Event | None = None) -> Descriptor | None:
        """A file of the cache, after its download if necessary; None while another process downloads it.

        Args:
            next_uses: steps until other files of this folder are needed.

        Raises:
            NoRoom: the bound or the disk allows no further file.
            UserError: it cannot be downloaded or stored.
        """
        name = f"{self.name}/{file.name}"
        found = self.cache.open(name)
        if found is not None:
            return found
        part = self.cache.start(name, file.size, lambda one: next_uses.get(one.removeprefix(f"{self.name}/"), math.inf))
        if part is None:
            return None
        try:
            for _ in range(READS):
                found_sum = file.hash()
                for start in range(0, file.size, READ_BYTES):
                    data = self.read(file.name, start, min(start + READ_BYTES, file.size), stop=stop)
                    self.cache.write(part, data, start)
                    found_sum.update(data)
                if file.checksum in (None, found_sum.hexdigest()):
                    return self.cache.finish(part)
                log.warning("%s/%s: wrong checksum; it is downloaded again", self.remote.address, file.name)
        except BaseException:
            self.cache.abandon(part)
            raise
        self.cache.abandon(part)
        raise UserError(
            f"{self.remote.address}/{file.name}: not the bytes that were packed (wrong checksum, {READS} times). "
            "Copy it there again, or pack again."
        )

    def read(self, name: str, start: int, end: int, **options: Any) -> bytes:
        """Read the bytes [start, end) of a file at the address, and count them. See `Remote.read`."""
        data = self.remote.read(name, start, end, **options)
        with self._lock:
            self.bytes += len(data)
        return data


class RemoteShards(Shards):
    """Shards of a folder at an address; any thread may read them.

    Args:
        shards: those of index.json.
        window: number of shards that are read at a time; None: all.

    Raises:
        UserError: the cache's bound does not allow as many shards as are needed at once.
    """

    def __init__(self, folder: RemoteFolder, shards: Sequence[dict[str, Any]], window: int | None) -> None:
        self._folder = folder
        self._files = [_File(shard["file"], shard["bytes"], shard.get("sha256")) for shard in shards]
        self.names = [file.name for file in self._files]
        self._rows = sum(shard["samples"] for shard in shards)
        self._window = len(shards) if window is None else min(window, len(shards))
        self._prefetchers: tuple[Prefetcher, ...] = ()
        self._counted = Traffic()
        self._damaged: set[int] = set()  # shards of which the disk returned other bytes
        self._lock = threading.Lock()
        self._require_room(window)
        self._require_open_files()

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """See `Shards`. Reads from the cache, waiting for a download that has begun, or else from the address.

        Raises:
            UserError: it cannot be downloaded.
            RuntimeError: the loader was closed meanwhile.
        """
        if offset + size > self._files[shard].size:
            raise OSError(f"{self.names[shard]} ends before byte {offset + size}")
        descriptor, at_once, closed = None, False, None
        for prefetcher in self._at_work():
            descriptor, at_once = prefetcher.get(shard)
            closed = prefetcher.closed
            if descriptor is not None:
                break
        if descriptor is None:
            descriptor = self._folder.cache.open(f"{self._folder.name}/{self.names[shard]}")
            at_once = descriptor is not None
        data = None if descriptor is None else _sound(descriptor, offset, size, crc32)
        with self._lock:
            self._counted += Traffic(1, int(at_once and data is not None), int(data is None))
        if descriptor is not None and data is None:
            self._warn_of_disk(shard)
        if data is None:
            try:
                check = partial(_fits, crc32=crc32)
                data = self._folder.read(self.names[shard], offset, offset + size, check=check, stop=closed)
            except Stopped:
                raise RuntimeError("the loader is closed") from None
        return data

    def _warn_of_disk(self, shard: int) -> None:
        """Log a line, once for each shard."""
        with self._lock:
            is_known = shard in self._damaged
            self._damaged.add(shard)
        if not is_known:
            log.warning(
                "%s/%s/%s: the disk returns other bytes than were downloaded; these images are read from %s. Remove "
                "this file, and check the disk",
                self._folder.cache.folder, self._folder.name, self.names[shard], self._folder.remote.address,
            )  # fmt: skip

    def follow(self, steps: Steps) -> Follower:
        """See `Shards`."""

        def make_uses() -> ShardUses:
            return ShardUses(steps(), shards=len(self._files), rows=self._rows, window=self._window)

        def fetch(shard: int, uses: dict[int, int], stop: threading.Event) -> Descriptor | None:
            by_name = {self.names[one]: steps for one, steps in uses.items()}
            return self._folder.fetch(self._files[shard], by_name, stop)

        address = self._folder.remote.address
        started = Prefetcher(make_uses, fetch, lambda shard: f"{address}/{self.names[shard]}")
        self._prefetchers = (*self._at_work(), started)
        return started

    def _at_work(self) -> list[Prefetcher]:
        return [one for one in self._prefetchers if not one.closed.is_set()]

    def traffic(self) -> Traffic:
        """See `Shards`."""
        with self._lock:
            return replace(self._counted, bytes=self._folder.bytes)

    def _require_room(self, window: int | None) -> None:
        sizes = sorted((bytes_on_disk(file.size) for file in self._files), reverse=True)
        # One more than a window: the next shard comes while the last images of the window are read.
        needed = self._folder.index_bytes() + sum(sizes[: self._window + 1])
        if needed <= self._folder.cache.limit:
            return
        what = (
            "all shards at once, since data.shuffle_shards is not set"
            if window is None
            else f"a window of data.shuffle_shards = {shards_in_words(window)} and one more at once"
        )
        remedy = ", or set data.shuffle_shards" if window is None else ", or a smaller data.shuffle_shards"
        raise UserError(
            f"data.cache_gb = {self._folder.cache.limit / 1e9:g}: {self._folder.remote.address} needs {what}, with the "
            f"index {_gigabytes(needed)} GB. Set data.cache_gb = {_gigabytes(needed)} or more{remedy}."
        )

    def _require_open_files(self) -> None:
        """Let this process have as many open files as it holds shards: by default it may have 1024."""
        held = min(2 * self._window + STEPS_UNDER_WAY, len(self._files)) + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY in (soft, hard) or held <= soft:
            return
        if held > hard:
            raise UserError(
                f"data.root = {self._folder.remote.address}: needs {held} open files at once, and {hard} are allowed "
                "('ulimit -Hn'). Set a smaller data.shuffle_shards, or pack fewer and larger shards."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _sound(descriptor: Descriptor, offset: int, size: int, crc32: int | None) -> bytes | None:
    """Bytes of a file of the cache; None if the disk returns other bytes than were written."""
    try:
        data = read_at(descriptor, size, offset)
    except (OSError, EOFError):
        return None
    return data if _fits(data, crc32) else None


def _fits(data: bytes, crc32: int | None) -> bool:
    return crc32 is None or zlib.crc32(data) == crc32


def _gigabytes(size: int) -> str:
    """Rounded up to three digits."""
    unit = 10 ** max(len(str(size)) - 3, 0)
    return f"{-(-size // unit) * unit / 1e9:.9f}".rstrip("0").rstrip(".")

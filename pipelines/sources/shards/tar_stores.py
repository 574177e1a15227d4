"""Reads images at their offsets in tar files, of a folder or at an address."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.samples.store import Bytes, Store
from peclr_dali.pipelines.sources.shards.tar_index import TarIndex

_WAITS_S: Final = (0.0, 0.2, 1.0, 3.0)
"""Seconds before each attempt to read from an address. fsspec's own attempts come on top."""

_TOO_LARGE: Final = f"only images of up to {MAX_FILE_BYTES >> 20} MiB are read"


class LocalTars(Store):
    """Reads from tar files in a folder."""

    def __init__(self, root: str, index: TarIndex) -> None:
        self._root, self._index = root, index

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        return [self._read(row) for row in rows]

    def _read(self, row: int) -> Bytes:
        index = self._index
        size = int(index.size[row])
        if size > MAX_FILE_BYTES:
            return OSError(_TOO_LARGE)
        try:
            descriptor = os.open(f"{self._root}/{index.tars[index.tar[row]]}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(descriptor, size, int(index.offset[row]))
            finally:
                os.close(descriptor)
        except OSError as error:
            return error
        return _whole(data, size)


class RemoteTars(Store):
    """Reads from tar files at an address, the images of a call in one request to fsspec.

    A range that fails, or whose answer is cut, is asked for again a few times. Then it counts as a bad file.
    """

    def __init__(self, folder: Folder, index: TarIndex) -> None:
        self._folder, self._index = folder, index

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        index = self._index
        read: dict[int, Bytes] = {row: OSError(_TOO_LARGE) for row in rows if index.size[row] > MAX_FILE_BYTES}
        left = [row for row in rows if row not in read]
        for wait_s in _WAITS_S:
            if not left:
                break
            time.sleep(wait_s)
            starts = [int(index.offset[row]) for row in left]
            sizes = [int(index.size[row]) for row in left]
            found = self._folder.ranges([str(index.tars[index.tar[row]]) for row in left], starts, sizes)
            read |= {row: _whole(data, size) for row, data, size in zip(left, found, sizes, strict=True)}
            left = [row for row in left if isinstance(read[row], OSError)]
        return [read[row] for row in rows]


class Folder:
    """A folder at an address, such as s3://bucket/folder. The environment has credentials and endpoints.

    Raises:
        UserError: no installed package reads such an address.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs  # takes a while to be imported

        self.address = address.rstrip("/")
        try:
            self._system, self._path = url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"data.root = {address!r} cannot be opened ({in_one_line(error, 200)}). For s3:// install "
                "'peclr-dali[s3]'; for others see fsspec's documentation"
            ) from error

    def file(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            UserError: it cannot be read.
        """
        try:
            content: bytes = self._system.cat_file(f"{self._path}/{name}")
        except Exception as error:  # of many libraries
            raise UserError(
                f"{self.address}/{name} cannot be read ({type(error).__name__}: {in_one_line(error, 200)}). Check "
                "data.root, the network, and the credentials in the environment"
            ) from error
        return content

    def sizes(self, names: Sequence[str]) -> list[int]:
        """The sizes of files. A file that cannot be found is a `UserError`."""
        try:
            return [int(size) for size in self._system.sizes([f"{self._path}/{name}" for name in names])]
        except Exception as error:
            raise UserError(
                f"{self.address}: its tar files cannot be listed ({type(error).__name__}: {in_one_line(error, 200)})"
            ) from error

    def ranges(self, names: Sequence[str], starts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """Bytes of files, or the exception for each that cannot be read."""
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        paths = [f"{self._path}/{name}" for name in names]
        try:
            return list(self._system.cat_ranges(paths, list(starts), ends, on_error="return"))
        except Exception as error:  # of the connection, before a single answer
            return [error] * len(paths)


def _whole(data: Any, size: int) -> Bytes:
    if isinstance(data, BaseException):
        return OSError(f"{type(data).__name__}: {in_one_line(data, 200)}")
    return data if len(data) == size else OSError(f"{len(data)} of {size} bytes could be read")

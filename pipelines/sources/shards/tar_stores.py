"""Reads images at their offsets in tar files, of a folder or at an address."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peclr_dali.errors import MachineError, UserError, in_one_line
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.samples.index import Bytes, Store
from peclr_dali.pipelines.sources.shards.tar_index import TarIndex

# Seconds before each attempt to read from an address. fsspec's own attempts come on top.
_WAITS_S = (0.0, 0.2, 1.0, 3.0)

MOST_IN_A_ROW = 64  # images that fail one after the other before the server is at fault, and not they

PATIENCE_S = 10.0
"""After it, a line says that a server has not answered."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class LocalTars(Store):
    """Reads from tar files in a folder."""

    def __init__(self, root: str, index: TarIndex) -> None:
        self._root, self._index = root, index

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        return [self._read(*place) for place in _places(self._index, rows)]

    def _read(self, tar: str, offset: int, size: int) -> Bytes:
        if size > MAX_FILE_BYTES:
            return _too_large()
        try:
            descriptor = os.open(f"{self._root}/{tar}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _whole(os.pread(descriptor, size, offset), size)
            finally:
                os.close(descriptor)
        except OSError as error:
            return error


class RemoteTars(Store):
    """Reads from tar files at an address, the images of a call in one request to fsspec.

    A range that fails, or whose answer is cut, is asked for again a few times. Then it counts as a bad file.
    """

    def __init__(self, folder: "Folder", index: TarIndex) -> None:
        self._folder, self._index = folder, index
        self._has_read, self._has_failed, self._failed_in_a_row = False, False, 0

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`.

        Raises:
            UserError: all attempts failed, and no image was ever read.
            MachineError: the same, of many images in a row, when others were read before.
        """
        places = dict(zip(rows, _places(self._index, rows), strict=True))
        read: dict[int, Bytes] = {row: _too_large() for row, (*_, size) in places.items() if size > MAX_FILE_BYTES}
        left = [row for row in rows if row not in read]
        errors: list[OSError] = []
        for wait_s in _WAITS_S:
            if not left:
                break
            time.sleep(wait_s)
            for row, data in zip(left, self._folder.ranges([places[row] for row in left]), strict=True):
                read[row] = _whole(data, places[row][2])
            errors = [error for error in map(read.get, left) if isinstance(error, OSError)]
            self._has_read |= len(errors) < len(left)
            if errors and not self._has_failed:
                self._has_failed = True
                log.warning(
                    "%s: an image cannot be read (%s); it is asked for %d times more, as are later ones",
                    self._folder.address, errors[0], len(_WAITS_S) - 1,
                )  # fmt: skip
            left = [row for row in left if isinstance(read[row], OSError)]
        self._failed_in_a_row = self._failed_in_a_row + len(left) if len(left) == len(places) else 0
        if errors and (not self._has_read or self._failed_in_a_row >= MOST_IN_A_ROW):
            raise (MachineError if self._has_read else UserError)(  # a retry may help if it has worked
                f"{self._folder.address}: no image could be read ({errors[0]}). Check the server and the network"
            )
        return [read[row] for row in rows]


def _places(index: TarIndex, rows: Sequence[int]) -> list[tuple[str, int, int]]:
    """Tar file, offset and size of some images."""
    return [(str(index.tars[index.tar[row]]), int(index.offset[row]), int(index.size[row])) for row in rows]


def _too_large() -> OSError:
    return OSError(f"only images of up to {MAX_FILE_BYTES >> 20} MiB are read")


def _whole(data: Any, size: int) -> Bytes:
    if isinstance(data, BaseException):
        return OSError(f"{type(data).__name__}: {in_one_line(data, 200)}")
    return data if len(data) == size else OSError(f"{len(data)} of {size} bytes could be read")


class Folder:
    """A folder at an address, such as s3://bucket/folder. The environment has credentials and endpoints.

    Raises:
        UserError: in all methods but `ranges`, something cannot be read, as without the package for such addresses.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs  # takes a while to be imported

        self.address = address.rstrip("/")
        self._system, self._path = self._try(self.address, lambda: url_to_fs(self.address))

    def file(self, name: str) -> bytes:
        """The content of a file."""
        return self._try(f"{self.address}/{name}", lambda: bytes(self._system.cat_file(f"{self._path}/{name}")))

    def require_ranges(self, name: str) -> None:
        """Raise a `UserError` if the server answers a request for a range of a file with all of it."""
        path = f"{self._path}/{name}"
        if len(self._try(f"{self.address}/{name}", lambda: self._system.cat_file(path, start=0, end=1))) != 1:
            raise UserError(
                f"{self.address}: the server gives whole files, not ranges of them. Copy the folder to a disk, or use "
                "a server that answers requests for ranges"
            )

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The sizes of files; None where the server does not say it."""
        return self._try(
            f"{self.address}/*.tar", lambda: list(self._system.sizes([f"{self._path}/{name}" for name in names]))
        )

    def _try(self, place: str, read: Callable[[], T]) -> T:
        waiting = threading.Timer(PATIENCE_S, log.warning, ("%s: no answer yet, still waiting", place))
        waiting.start()
        try:
            return read()
        except Exception as error:  # of many libraries
            secret = self.address.partition("://")[2].rpartition("@")[0] or "\0"
            raise UserError(
                f"{place} cannot be read ({type(error).__name__}: {in_one_line(error).replace(secret, '***')}). Check "
                "data.root, the network and the credentials in the environment"
                + isinstance(error, ImportError)
                * ". For s3://, \"pip install '.[s3]'\" in the checkout"
            ) from error
        finally:
            waiting.cancel()

    def ranges(self, places: Sequence[tuple[str, int, int]]) -> list[Any]:
        """Bytes at some places (file, offset and size), or the exception for each that cannot be read."""
        names, starts, sizes = zip(*places, strict=True)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        paths = [f"{self._path}/{name}" for name in names]
        try:
            return self._try(
                self.address, lambda: list(self._system.cat_ranges(paths, list(starts), ends, on_error="return"))
            )
        except UserError as error:  # of the connection, before a single answer
            return [error.__cause__] * len(paths)

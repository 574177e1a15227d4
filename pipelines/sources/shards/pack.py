"""Packs many small files into few large tar files, which are faster to read from any storage."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.shards.tar_index import TarIndex, label_arrays, scan_tar

_AT_ONCE: Final = 256
"""Images that are read ahead of the writer."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """What was packed: numbers of images, tar files and bytes, and the images that could not be used, with reasons."""

    samples: int
    tars: int
    bytes: int
    left_out: Mapping[str, str]


def pack(
    index: Index,
    out: Path,
    *,
    per_tar: int,
    workers: int,
    progress: Progress = lambda done, total: None,
    chosen: Mapping[str, Any] | None = None,
) -> Packed:
    """Write the images of an index into tar files, in its order, and their index.npz.

    All is written into `out`.unfinished, which is renamed at the end, so `out` is complete or not there. An unfinished
    folder of an earlier call is removed. Files that cannot be used are left out.

    Args:
        index: index of one source, its boxes without margin.
        out: a folder that is missing or empty.
        per_tar: images in a tar file.
        workers: threads that read.
        progress: called with (images done, images in all).
        chosen: `load.choices`, which a run on the tar files may repeat.

    Raises:
        UserError: `out` is not empty or cannot be written to, or no image can be used.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is not empty: name a new folder for the tar files")
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        packer = _Packer(index, unfinished, workers, progress)
        for first in range(0, len(index), per_tar):
            packer.write_tar(range(first, min(first + per_tar, len(index))))
        packed = packer.finish(chosen or {})
        if out.is_dir():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written ({error.strerror}): make room, then pack again"
        ) from error
    return packed


class _Packer:
    """Writes tar files, one after the other; the arguments are those of `pack`."""

    def __init__(self, index: Index, folder: Path, workers: int, progress: Progress) -> None:
        self._index, self._folder, self._progress = index, folder, progress
        self._pool = ThreadPoolExecutor(workers)
        self._rows: list[int] = []
        self._places: list[tuple[bytes, int, int, int]] = []  # name, tar, offset, size
        self._tars: list[Path] = []
        self._left_out: dict[str, str] = {}

    def write_tar(self, rows: Sequence[int]) -> None:
        """Write the next tar file. Equal images give equal bytes: no times and no owners."""
        file = self._folder / f"shard-{len(self._tars):06d}.tar"
        with tarfile.open(file, "x:", format=tarfile.USTAR_FORMAT) as tar:
            for some in (rows[first : first + _AT_ONCE] for first in range(0, len(rows), _AT_ONCE)):
                for row, data in zip(some, self._pool.map(self._read, some), strict=True):
                    if isinstance(data, Exception):
                        self._left_out[str(self._index.path(row))] = str(data)
                        continue
                    ending = {b"\xff": "jpg", b"\x89": "png", b"R": "webp"}[data[:1]]
                    member = tarfile.TarInfo(f"{row:09d}.{ending}")
                    member.size = len(data)
                    offset = tar.offset + tarfile.BLOCKSIZE
                    tar.addfile(member, BytesIO(data))
                    self._places.append((member.name.encode(), len(self._tars), offset, len(data)))
                    self._rows.append(row)
                self._progress(some[-1] + 1, len(self._index))
        self._tars.append(file)

    def _read(self, row: int) -> bytes | Exception:
        try:
            data = self._index.read(row)
            check_image(data)
        except (OSError, BadImage) as error:
            return error
        return data

    def finish(self, chosen: Mapping[str, Any]) -> Packed:
        """Write the index."""
        self._pool.shutdown()
        if not self._rows:
            path, reason = next(iter(self._left_out.items()))
            raise UserError(
                f"{self._index.root}: none of its {len(self._index)} images can be used; the first is {path}: "
                f"{reason}. Mend or replace the files, or name another folder."
            )
        labels = {name: array[self._rows] for name, array in label_arrays(self._index).items()}
        _index_of(self._index.name, self._folder, self._tars, self._places, labels, chosen).write(self._folder)
        size = sum(tar.stat().st_size for tar in self._tars)
        return Packed(len(self._rows), len(self._tars), size, self._left_out)


def index_tars(folder: Path, *, progress: Progress = lambda done, total: None) -> Packed:
    """Write the index.npz of tar files in a folder and below it, which another program wrote. They stay as they are.

    Args:
        progress: called with (tar files done, tar files in all).

    Raises:
        UserError: there are none with images, one cannot be read, or the index cannot be written.
    """
    tars = sorted(folder.rglob("*.tar"))
    places: list[tuple[bytes, int, int, int]] = []
    for number, tar in enumerate(tars):
        places += [(name, number, offset, size) for name, offset, size in scan_tar(tar)]
        progress(number + 1, len(tars))
    if not places:
        raise UserError(f"{folder}: found {len(tars)} .tar files, and no image in them. Check the path")
    try:
        _index_of(folder.name, folder, tars, places, {}, {}).write(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): the index stands beside the tar files"
        ) from error
    return Packed(len(places), len(tars), sum(tar.stat().st_size for tar in tars), {})


def _index_of(
    name: str,
    folder: Path,
    tars: Sequence[Path],
    places: Sequence[tuple[bytes, int, int, int]],
    labels: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> TarIndex:
    members, tar, offset, size = zip(*places, strict=True)
    return TarIndex(
        name,
        np.array([file.relative_to(folder).as_posix() for file in tars]),
        np.array([file.stat().st_size for file in tars], np.int64),
        np.array(members, np.bytes_),
        np.array(tar, np.int64),
        np.array(offset, np.int64),
        np.array(size, np.int64),
        labels=labels,
        chosen=chosen,
    )

"""Packs many small files into few large tar files, which are faster to read from any storage."""

import logging
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.folder import ARCHIVES, BROKEN_LINK, NO_FILE, counts_in_words, files_under
from peclr_dali.pipelines.sources.shards.tar_index import INDEX_FILE, TarIndex, label_arrays, parse_index, scan_tar

_AT_ONCE = 256  # images that are read ahead of the writer

_LOCK = "process.lock"
_ENDING_OF = {b"\xff": "jpg", b"\x89": "png", b"R": "webp"}  # by the first byte of an image

_UNUSABLE = (*ARCHIVES, BROKEN_LINK, NO_FILE)

log = logging.getLogger(__name__)

Place = tuple[bytes, int, int, int]
"""An image's name, the number of its tar file, its offset and size there."""

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
        chosen: `choices` of the source, which a run on the tar files may repeat.

    Raises:
        UserError: `out` is not empty or cannot be replaced, or no image can be used.
        OSError: `out` cannot be written to.
    """
    out = Path(os.path.realpath(out))  # a link stays, and its folder is written
    if (out.exists() and not out.is_dir()) or (
        out.is_dir() and (any(out.iterdir()) or out.is_mount() or out == Path.cwd())
    ):
        raise UserError(
            f"{out} is not empty, the working folder or a mount, or is a file: name a new folder for the tar files"
        )
    unfinished = out.with_name(f"{out.name}.unfinished")
    for path in unfinished.glob("*"):
        if not (
            re.fullmatch(rf"shard-\d+\.tar|index\.npz(\..*\.part)?|{_LOCK}", path.name)
            and (unfinished / _LOCK).exists()
        ):
            raise UserError(f"{path}: 'pack' would replace this folder, which it did not write. Name another OUT")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with FileLock(unfinished / _LOCK, blocking=False), ThreadPoolExecutor(workers) as pool:
            for path in unfinished.glob("[!p]*"):  # all but the lock
                path.unlink()
            packed = _write(index, unfinished, per_tar, pool, progress, chosen or {})
            (unfinished / _LOCK).unlink()
            if out.is_dir():
                out.rmdir()
            unfinished.rename(out)
    except Timeout:
        raise UserError(f"{unfinished}: another 'pack' writes there. Wait for its end, or name another OUT") from None
    return packed


def _write(
    index: Index, folder: Path, per_tar: int, pool: ThreadPoolExecutor, progress: Progress, chosen: Mapping[str, Any]
) -> Packed:
    """Write the tar files, one after the other, and their index. Equal images give equal bytes: no times, no owners."""

    def read(row: int) -> bytes | Exception:
        try:
            data = index.read(row)
            check_image(data)
        except (OSError, BadImage) as error:
            return error
        return data

    rows, places, tars = list[int](), list[Place](), list[Path]()
    left_out: dict[str, str] = {}
    for first in range(0, len(index), per_tar):
        tars.append(folder / f"shard-{len(tars):06d}.tar")
        end = min(first + per_tar, len(index))
        with tarfile.open(tars[-1], "x:", format=tarfile.USTAR_FORMAT) as tar:
            for some in (range(start, min(start + _AT_ONCE, end)) for start in range(first, end, _AT_ONCE)):
                for row, data in zip(some, pool.map(read, some), strict=True):
                    if isinstance(data, Exception):
                        left_out[index.location(row)] = str(data)
                        continue
                    member = tarfile.TarInfo(f"{row:09d}.{_ENDING_OF[data[:1]]}")
                    member.size = len(data)
                    places.append((member.name.encode(), len(tars) - 1, tar.offset + tarfile.BLOCKSIZE, len(data)))
                    tar.addfile(member, BytesIO(data))
                    rows.append(row)
                progress(some[-1] + 1, len(index))
    if not rows:
        path, reason = next(iter(left_out.items()))
        raise UserError(
            f"{index.root}: none of its {len(index)} images can be used; the first is {path}: {reason}. Mend or "
            "replace the files, or name another folder."
        )
    labels = {name: array[rows] for name, array in label_arrays(index).items()}
    _write_index(index.name, folder, tars, places, labels, chosen)
    return Packed(len(rows), len(tars), sum(tar.stat().st_size for tar in tars), left_out)


def index_tars(folder: Path, *, progress: Progress = lambda done, total: None) -> Packed:
    """Write the index.npz of tar files in a folder and below it, which another program wrote. They stay as they are.

    Args:
        progress: called with (tar files done, tar files in all).

    Raises:
        UserError: there are none with images, one cannot be read, or the index that is there has labels.
        OSError: the index cannot be written.
    """
    file = folder / INDEX_FILE
    try:
        labels = parse_index(regular(file).read_bytes(), str(file)).labels
    except (OSError, UserError):  # there is none, or it is damaged
        labels = {}
    if labels:
        raise UserError(
            f"{file} was written by 'pack' and has the labels of its images. Move it away to do without them"
        )
    names, others = files_under(folder, (".tar",))
    tars = [folder / name for name in sorted(names)]
    if unusable := {kind: count for kind, count in others.items() if kind in _UNUSABLE}:
        log.warning("%s: not read: %s; unpack archives", folder, counts_in_words(unusable))
    places = list[Place]()
    for number, tar in enumerate(tars):
        places += [(name, number, offset, size) for name, offset, size in scan_tar(tar)]
        progress(number + 1, len(tars))
    if not places:
        raise UserError(f"{folder}: found {len(tars)} .tar files, and no image in them. Check the path")
    _write_index(folder.name, folder, tars, places, {}, {})
    return Packed(len(places), len(tars), sum(tar.stat().st_size for tar in tars), {})


def _write_index(
    name: str,
    folder: Path,
    tars: Sequence[Path],
    places: Sequence[Place],
    labels: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> None:
    members, tar, offset, size = zip(*places, strict=True)
    TarIndex(
        name,
        np.array([file.relative_to(folder).as_posix() for file in tars]),
        np.array([file.stat().st_size for file in tars], np.int64),
        np.array(members, np.bytes_),
        np.array(tar, np.int64),
        np.array(offset, np.int64),
        np.array(size, np.int64),
        labels=labels,
        chosen=chosen,
    ).write(folder)

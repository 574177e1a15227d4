"""The index of tar files, index.npz: where each image is, and its labels."""

import io
import json
import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.pipelines.arrays import AnyArray, IntArray
from peclr_dali.pipelines.samples.index import ROWS, Index
from peclr_dali.pipelines.sources.folder import ARCHIVES, IMAGE_ENDINGS, NOT_READ, counts_in_words
from peclr_dali.writing import whole_file

INDEX_FILE = "index.npz"

LABELS = ("box_px", "keypoints_px", "mirror", "group")
"""Arrays of an `Index`. Its targets are stored with `TARGET` before their names."""

TARGET = "target."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TarIndex:
    """N images in T tar files.

    Attributes:
        name: name of the source, for messages.
        tars: (T,) text, the files, relative to the folder.
        tar_bytes: (T,) int64, their sizes.
        members: (N,) bytes, the images' names in their tar files.
        tar: (N,) int64, the tar file of each image.
        offset: (N,) int64, first byte of each image in its tar file.
        size: (N,) int64, bytes of each image.
        labels: arrays with N rows by name, as `label_arrays` gives them; empty for tar files of other programs.
        chosen: the keys of `DataConfig` that chose images and boxes, as they were when these were packed.
    """

    name: str
    tars: AnyArray
    tar_bytes: IntArray
    members: AnyArray
    tar: IntArray
    offset: IntArray
    size: IntArray
    labels: Mapping[str, AnyArray] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The names of the samples: each that of its tar file, and its own within it."""
        tars = [f"{tar}/" for tar in self.tars.tolist()]
        return [
            tars[tar] + os.fsdecode(name) for tar, name in zip(self.tar.tolist(), self.members.tolist(), strict=True)
        ]

    def write(self, folder: Path) -> None:
        """Write `INDEX_FILE`, completely or not at all."""
        about = json.dumps({"name": self.name, "chosen": self.chosen}).encode()
        arrays = {name: getattr(self, name) for name in _PLACES} | dict(self.labels)
        with whole_file(folder / INDEX_FILE) as file:
            np.savez(file, about=np.frombuffer(about, np.uint8), allow_pickle=False, **arrays)


# The arrays of a `TarIndex` that are no labels; see `ROWS`.
_PLACES = {
    "tars": ((), "U"), "tar_bytes": ((), "iu"), "members": ((), "S"), "tar": ((), "iu"), "offset": ((), "iu"),
    "size": ((), "iu"),
}  # fmt: skip


def label_arrays(index: Index) -> dict[str, AnyArray]:
    """The labels of an index by the names that `TarIndex.labels` has."""
    arrays = {name: getattr(index, name) for name in LABELS}
    arrays |= {TARGET + name: table for name, table in index.targets.items()}
    return {name: array for name, array in arrays.items() if array is not None}


def parse_index(data: bytes, origin: str) -> TarIndex:
    """The index in the content of an `INDEX_FILE`; `origin` is for messages.

    Raises:
        UserError: it is damaged, or another program's.
    """
    try:
        with np.lib.npyio.NpzFile(io.BytesIO(data)) as file:  # `np.load` takes other files for pickles
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        for name, array in arrays.items():
            row, kinds = (_PLACES | ROWS).get(name.removeprefix(TARGET), (array.shape[1:], "fiub"))
            if array.shape[1:] != row or array.dtype.kind not in kinds:
                raise ValueError(f"{name} is {array.shape} of {array.dtype}")
        index = TarIndex(
            str(about["name"]),
            **{name: arrays.pop(name) for name in _PLACES},
            labels=arrays,
            chosen=dict(about["chosen"]),
        )
        rows = {len(array) for array in (index.members, index.tar, index.offset, index.size, *arrays.values())}
        if (
            len(rows) > 1
            or len(index.tars) != len(index.tar_bytes)
            or any(table.min(initial=0) < 0 for table in (index.tar, index.offset, index.size))
            or (index.offset + index.size > index.tar_bytes[index.tar]).any()
        ):
            raise ValueError(f"its arrays of {sorted(rows)} rows do not fit each other")
    except Exception as error:  # damaged content may raise anything
        raise UserError(
            f"{origin} is not an index of tar files ({' '.join(str(error).split())[:200]}). Copy it again, or make it "
            "with 'python cli.py pack'"
        ) from error
    return index


_END_BYTES = 2 * tarfile.BLOCKSIZE  # zeros that end an archive, unless more of them fill its last record

# Sizes of records: of tar, unless `tar -b` says otherwise, and usual others.
_RECORDS_BYTES = (tarfile.RECORDSIZE, 2 * tarfile.RECORDSIZE, *(2**power for power in range(10, 21)))


def scan_tar(file: Path) -> list[tuple[bytes, int, int]]:
    """Name, offset and size of each image in a tar file, which may be several that were joined.

    Of members of the same name the last one counts, as where they are unpacked. A hard link is the file that it names.
    Symbolic links, images of other formats and archives are left out; a warning counts them, and the zeros of a long
    end.

    Raises:
        UserError: it is no tar file, it is cut or damaged, or an image in it is stored as a sparse file.
    """
    members, odd = dict[str, tuple[int, int]](), Counter[str]()
    at = size = 0
    try:
        with regular(file).open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            while at < size or size == 0:
                start = opened.seek(at)
                tar = tarfile.TarFile(fileobj=opened)
                for member in tar:
                    # A file may be spelled in several ways, and is unpacked to one place.
                    name, link = (os.path.normpath(path).lstrip("/") for path in (member.name, member.linkname))
                    odd["symbolic links"] += member.issym() and _is_image(name)
                    odd["hidden images"] += name.lower().endswith(IMAGE_ENDINGS) and not _is_image(name)
                    odd["images of other formats"] += name.lower().endswith(NOT_READ)
                    odd["archives within it"] += name.lower().endswith(ARCHIVES)
                    if member.islnk() and link in members:
                        members[name] = members[link]
                    elif (
                        member.size < 0
                        or member.type == b"M"
                        or ((member.islnk() or member.issparse()) and _is_image(member.name))
                    ):
                        raise tarfile.ReadError(
                            f"{member.name} is a sparse file, a hard link to none before it, a part of a file, or of "
                            "negative size,"
                        )
                    elif member.isfile() or member.type not in tarfile.SUPPORTED_TYPES:  # POSIX: then it is a file
                        members[name] = member.offset_data, member.size
                    at = tar.offset
                end = _end_of_archive(opened, start, at)
                odd["bytes of zeros at the end, as in a copy that was cut"] += (end - at) * (
                    end - at > tarfile.RECORDSIZE + _END_BYTES
                )
                at = end
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        images = sum(map(_is_image, members))
        raise UserError(
            f"{file} cannot be read as a tar file: {error} at byte {min(at, size)}, after {images} images; expected a "
            "whole, uncompressed one. Copy it again, or unpack and pack it again"
        ) from error
    if odd := +odd:
        log.warning("%s: not read: %s", file, counts_in_words(odd))
    return [(name.encode(errors="surrogateescape"), *place) for name, place in members.items() if _is_image(name)]


# Hidden files and folders, and those of the system, as in `folder.py`.
_HIDDEN = re.compile(r"(^|/)(\.[^/.]|__MACOSX/|@eaDir/|[#@$]recycle)", re.IGNORECASE)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS) and not _HIDDEN.search(name)


def _end_of_archive(opened: BinaryIO, start: int, at: int) -> int:
    """The first byte after an archive from byte `start` on whose members end at byte `at`.

    Raises:
        tarfile.ReadError: it has no such end as tar writes, so members may be missing.
    """
    opened.seek(at)
    rest = opened.read(_END_BYTES + max(_RECORDS_BYTES))
    zeros = len(rest) - len(rest.lstrip(b"\0"))
    filled = [record for record in _RECORDS_BYTES if (at + zeros - start) % record == 0]  # the last record, by zeros
    if zeros != _END_BYTES and not _END_BYTES < zeros < _END_BYTES + max(filled, default=0):
        raise tarfile.ReadError("neither a member nor the end of an archive")
    return at + zeros

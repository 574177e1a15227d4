"""The index of tar files, index.npz: where each image is, and its labels."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.folder import IMAGE_ENDINGS
from peclr_dali.writing import whole_file

INDEX_FILE: Final = "index.npz"

LABELS: Final = ("box_px", "keypoints_px", "mirror", "group")
"""Arrays of an `Index`. Its targets are stored with `TARGET` before their names."""

TARGET: Final = "target."


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
    tars: npt.NDArray[np.str_]
    tar_bytes: IntArray
    members: npt.NDArray[np.bytes_]
    tar: IntArray
    offset: IntArray
    size: IntArray
    labels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tar)

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


_PLACES: Final = ("tars", "tar_bytes", "members", "tar", "offset", "size")


def label_arrays(index: Index) -> dict[str, npt.NDArray[Any]]:
    """The labels of an index by the names that `TarIndex.labels` has."""
    arrays = {name: getattr(index, name) for name in LABELS}
    arrays |= {TARGET + name: one for name, one in index.targets.items()}
    return {name: array for name, array in arrays.items() if array is not None}


def parse_index(data: bytes, origin: str) -> TarIndex:
    """The index in the content of an `INDEX_FILE`; `origin` is for messages.

    Raises:
        UserError: it is damaged, or another program's.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        index = TarIndex(
            str(about["name"]),
            **{name: arrays.pop(name) for name in _PLACES},
            labels=arrays,
            chosen=dict(about["chosen"]),
        )
        rows = {len(one) for one in (*(getattr(index, name) for name in _PLACES[2:]), *arrays.values())}
        if len(rows) > 1 or (index.tar >= len(index.tars)).any() or (index.tar < 0).any():
            raise ValueError(f"its arrays of {sorted(rows)} rows do not fit each other")
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{origin} is not an index of tar files ({' '.join(str(error).split())[:200]}). Copy it again, or make it "
            "with 'python cli.py pack'"
        ) from error
    return index


_OF_MACOS: Final = re.compile(r"(^|/)(\._|__MACOSX/)")


def scan_tar(file: Path) -> list[tuple[bytes, int, int]]:
    """Name, offset and size of each image in a tar file.

    Raises:
        UserError: it is no tar file, or it is cut.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            return [
                (member.name.encode(errors="surrogateescape"), member.offset_data, member.size)
                for member in tar
                if member.isfile() and member.name.lower().endswith(IMAGE_ENDINGS) and not _OF_MACOS.search(member.name)
            ]
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as a tar file ({error}): expected a whole, uncompressed one. Copy it again"
        ) from error

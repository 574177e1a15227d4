"""The table of samples: files, boxes and labels."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from errors import UserError
from pipelines.files.image_file import MAX_FILE_BYTES
from pipelines.samples.kept_pixels import KeptPixels, join_pixels
from pipelines.samples.store import Follower, JoinedStore, SelectedStore, Steps, Store
from skeleton import HAND, Skeleton

_FAULTS_OF_A_FILE: Final = (
    None,  # an error of our own, such as a wrong checksum
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip

WHOLE_IMAGE = (0.0, 0.0, 0.0)
"""The box for the square around a whole image; its size is read later, from the file's header."""


@dataclass(frozen=True)
class Blocks:
    """Samples that are stored together, so that a shuffle may keep them near each other.

    Attributes:
        first: (B + 1,) int64, first row of each block, and the end of the last.
        window: number of blocks that are shuffled together.
    """

    first: npt.NDArray[np.int64]
    window: int


@dataclass(frozen=True)
class SourceRows:
    """One source of a joined index. Its `count` rows follow those of the previous source.

    Attributes:
        weight: its share of a batch is this weight over the sum of all weights.
        blocks: blocks of its rows, counted from its first; None if it is shuffled as a whole.
    """

    name: str
    count: int
    weight: float
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Index:
    """The N samples of a source: files, boxes and labels.

    Attributes:
        name: name of the source, for messages.
        root: folder that `paths` are relative to.
        paths: (N,) file names; with a store, the names of its samples.
        box_px: (N, 3) float32, centre x, centre y and side of the square around the hand, in pixels of the image as
            decoded (EXIF orientation applied), corner-based (the centre of the first pixel is 0.5, 0.5). A side of 0
            means the square around the whole image.
        keypoints_px: (N, K, 2) float32 in the same frame, or None; the K keypoints of `skeleton`. Pictures show them;
            pre-training never reads them. A keypoint that is not known is NaN.
        skeleton: the names of the K keypoints, and their bones.
        mirror: (N,) bool, the samples whose canonical view is the box seen in a mirror, left for right, so that left
            hands look like right ones; None mirrors none. The mirror is part of `source_to_view_px` and not of the
            augmentation, so keypoints are mirrored too and the loss does not undo it. Boxes, keypoints and targets of
            the index belong to the image before mirroring.
        group: (N,) int64 or None; samples of the same pose or moment share a number, so that subsets keep them
            together. None: each sample is its own group.
        targets: further float32 arrays with N rows, by name, as far as the dataset has them:

            - "K" (N, 3, 3), the camera matrix: from the camera's frame to pixels of the image as decoded,
              corner-based. `source_to_view_px` times K projects into a view, mirrored or not.
            - "xyz_m" (N, K, 3), keypoints in metres, in `keypoints_px`'s order, in the camera's frame: x right,
              y down, z forward, so K xyz divided by depth is `keypoints_px`. NaN where a keypoint is not known.
            - "scale_m" (N,), metres, length of the skeleton's reference bone, which scale-normalised poses take as 1.
            - "xyz_px" (N, K, 3), where no camera is known: `keypoints_px` and a depth in the same unit (weak
              perspective), so a pose up to scale and shift.

        sources: the sources of a joined index, in the order of its rows; empty for a single source.
        store: reads the bytes of a sample; None if each sample is a file at `paths`.
        pixels: the images that are kept decoded; None for files. With pixels there are no files, and `read` raises.
        blocks: rows that are stored together, for the shuffle. For a joined index, see `sources`.
    """

    name: str
    root: Path
    paths: Sequence[str]
    box_px: npt.NDArray[np.float32]
    keypoints_px: npt.NDArray[np.float32] | None = None
    mirror: npt.NDArray[np.bool_] | None = None
    group: npt.NDArray[np.int64] | None = None
    targets: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    sources: tuple[SourceRows, ...] = ()
    store: Store | None = None
    pixels: KeptPixels | None = None
    blocks: Blocks | None = None
    skeleton: Skeleton = HAND

    def __post_init__(self) -> None:
        count = len(self.paths)
        for name, array in (self._arrays | self.targets).items():
            if array is not None and len(array) != count:
                raise ValueError(f"{self.name}: {name} has {len(array)} rows for {count} samples")
        if self.keypoints_px is not None and self.keypoints_px.shape[1] != len(self.skeleton):
            found, expected = self.keypoints_px.shape[1], len(self.skeleton)
            raise ValueError(f"{self.name}: found {found} keypoints, expected {expected} of a {self.skeleton.name}")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def _arrays(self) -> dict[str, Any]:
        """The arrays with a row for each sample, besides the targets."""
        return {name: getattr(self, name) for name in ("box_px", "keypoints_px", "mirror", "group")}

    @property
    def counts(self) -> list[int]:
        """Samples of each source."""
        return [source.count for source in self.sources] or [len(self)]

    @property
    def mirrored(self) -> npt.NDArray[np.bool_]:
        """(N,) bool, `mirror` as an array also if it is None."""
        return np.zeros(len(self), bool) if self.mirror is None else self.mirror

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """(N,) int64, `group` as an array also if it is None."""
        return np.arange(len(self)) if self.group is None else self.group

    def in_words(self) -> str:
        """Counts of images and checksums of file names and boxes: alike on two hosts with the same images.

        Names are taken without their folders, and those of a store are left out, since they are on the disk.
        """
        files = zlib.crc32(b"")
        if not isinstance(self.paths, LazyNames):
            files = zlib.crc32(
                "\n".join(path.rpartition("/")[2] for path in self.paths).encode(errors="surrogateescape")
            )
        boxes = zlib.crc32(np.ascontiguousarray(self.box_px).data)
        return f"{' + '.join(map(str, self.counts))} images (checksums {files:08x} of names, {boxes:08x} of boxes)"

    def select(self, rows: npt.NDArray[np.int64]) -> Index:
        """The index of the samples at `rows`, in this order. The index must have a single source."""
        if self.sources:
            raise ValueError(f"{self.name}: select rows of each source before the sources are joined")
        store = self.store
        arrays: dict[str, Any] = {name: None if table is None else table[rows] for name, table in self._arrays.items()}
        return replace(
            self,
            paths=[self.paths[row] for row in rows.tolist()]
            if store is None
            else LazyNames(len(rows), lambda row: self.paths[int(rows[row])]),
            **arrays,
            targets={name: array[rows] for name, array in self.targets.items()},
            store=None if store is None else SelectedStore(store, rows),
            pixels=None if self.pixels is None else self.pixels.select(rows),
            blocks=None if self.blocks is None else _selected_blocks(self.blocks, rows),
        )

    def path(self, sample: int) -> Path:
        """Full path of one sample."""
        return self.root / self.paths[sample]

    def read(self, sample: int) -> bytes:
        """Read the bytes of one sample's file; any thread may call it.

        Raises:
            OSError: it cannot be read; the file is at fault.
            UserError: the machine is at fault, as without memory or with too many open files.
        """
        try:
            return read_file(f"{self.root}/{self.paths[sample]}") if self.store is None else self.store.read(sample)
        except OSError as error:
            if error.errno in _FAULTS_OF_A_FILE:
                raise
            raise UserError(
                f"{self.path(sample)}: {error.strerror}. This may be an error of the machine, so the image is not "
                "replaced. Check memory, disk, network and 'ulimit -n'; a run goes on with --resume auto. If only "
                "this file cannot be read, replace or remove it."
            ) from error

    def follow(self, steps: Steps) -> Follower:
        """Let the store prepare for the samples of the coming steps."""
        return Follower() if self.store is None else self.store.follow(steps)


def read_file(path: str) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read, is a pipe or device, which might never end, or is larger than `MAX_FILE_BYTES`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # a file object for a folder's descriptor would raise without closing it
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size > MAX_FILE_BYTES:
            raise OSError(f"{found.st_size >> 20} MiB; only files of up to {MAX_FILE_BYTES >> 20} MiB are read")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def join(indices: Sequence[Index], weights: Sequence[float]) -> Index:
    """Join at least one index: the rows of the first, then those of the second, and so on.

    A source's share of a batch is its weight over the sum of all weights.

    Keypoints of a source without any are NaN. If all sources have keypoints, missing targets "K" and "xyz_m" are NaN
    too. Other targets are kept only if all sources have them.

    Raises:
        UserError: the sources label different skeletons, or only some of them are kept as pixels.
    """
    if len(indices) == 1:
        return indices[0]
    pixels = [index.pixels for index in indices if index.pixels is not None]
    if 0 < len(pixels) < len(indices):
        files = next(index.root for index in indices if index.pixels is None)
        raise UserError(f"{pixels[0].limits[0].root} holds pixels and {files} files: pack all sources alike")
    labelled = {index.skeleton.name: index for index in indices if index.keypoints_px is not None}
    if len(labelled) > 1:
        told = " and ".join(f"a {name} ({index.root})" for name, index in labelled.items())
        raise UserError(f"the sources label {told}: expected one kind of skeleton. Train on them one by one")
    common, folders = _common_root([str(index.root) for index in indices])
    stored = any(index.store is not None for index in indices)
    counts = [len(index) for index in indices]
    first = [0, *accumulate(counts)]

    def name_of(row: int) -> str:
        number = bisect_right(first, row) - 1
        return f"{folders[number]}/{indices[number].paths[row - first[number]]}"

    in_part = ("K", "xyz_m") if all(index.keypoints_px is not None for index in indices) else ()
    names = dict.fromkeys([*in_part, *(n for n in indices[0].targets if all(n in index.targets for index in indices))])
    return Index(
        name=" + ".join(index.name for index in indices),
        root=Path(common),
        paths=LazyNames(first[-1], name_of)
        if stored
        else [f"{folder}/{path}" for folder, index in zip(folders, indices, strict=True) for path in index.paths],
        box_px=np.concatenate([index.box_px for index in indices]),
        keypoints_px=_joined([index.keypoints_px for index in indices], counts),
        mirror=_joined([index.mirror for index in indices], counts, missing=False),
        group=_join_groups(indices),
        targets={
            name: table
            for name in names
            if (table := _joined([index.targets.get(name) for index in indices], counts)) is not None
        },
        sources=tuple(
            SourceRows(index.name, len(index), weight, index.blocks)
            for index, weight in zip(indices, weights, strict=True)
        ),
        store=JoinedStore([index.read for index in indices], [index.store for index in indices], counts)
        if stored
        else None,
        pixels=join_pixels(pixels) if pixels else None,
        skeleton=next((index.skeleton for index in labelled.values()), HAND),
    )


def _common_root(roots: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that holds all roots, and each root relative to it. If one is an address: "", and the full roots."""
    if any("://" in root for root in roots):
        return "", [root if "://" in root else os.path.abspath(root) for root in roots]  # noqa: PTH100
    absolute = [os.path.abspath(root) for root in roots]  # noqa: PTH100  links stay as they are
    common = os.path.commonpath(absolute)
    return common, [os.path.relpath(root, common) for root in absolute]


class LazyNames(Sequence[str]):
    """The names of a store's samples, each read from the disk by `name` only when it is used."""

    def __init__(self, count: int, name: Callable[[int], str]) -> None:
        self._rows, self._name = range(count), name

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._name(one) for one in self._rows[row]]
        return self._name(self._rows[row])


def _selected_blocks(blocks: Blocks, rows: npt.NDArray[np.int64]) -> Blocks:
    """The blocks of some of the rows, ascending; a row may be selected several times."""
    if (np.diff(rows) < 0).any():
        raise ValueError("select rows of blocks in ascending order")
    return Blocks(np.searchsorted(rows, blocks.first).astype(np.int64), blocks.window)


def _joined(
    tables: Sequence[npt.NDArray[Any] | None], counts: Sequence[int], *, missing: float = np.nan
) -> npt.NDArray[Any] | None:
    """Concatenate tables. A table that is None is filled with `missing`; the result is None if all are None."""
    known = next((table for table in tables if table is not None), None)
    if known is None:
        return None
    return np.concatenate([
        np.full((count, *known.shape[1:]), missing, known.dtype) if table is None else table
        for table, count in zip(tables, counts, strict=True)
    ])  # fmt: skip


def _join_groups(indices: Sequence[Index]) -> npt.NDArray[np.int64] | None:
    """Join the groups; groups of different sources stay different."""
    if all(index.group is None for index in indices):
        return None
    groups, first = [], 0
    for index in indices:
        group = np.unique(index.groups, return_inverse=True)[1]
        groups.append(group + first)
        first += int(group.max(initial=-1)) + 1
    return np.concatenate(groups)

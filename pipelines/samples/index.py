"""The table of samples: files, boxes, labels; of one source, or of several that are joined."""

import errno
import os
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import AnyArray, BoolArray, DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.config import is_address
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.samples.partners import Partners
from peclr_dali.skeleton import HAND

_FAULTS_OF_A_FILE: Final = (
    None,  # an error of our own, such as a wrong checksum
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip

Bytes = bytes | OSError
"""A sample's bytes, or why they cannot be read."""

WHOLE_IMAGE = (0.0, 0.0, 0.0)
"""The box for the square around a whole image; its size is read later, from the file's header."""


class Store(ABC):
    """Reads the bytes of samples that are not files of their own, such as those in tar files; any thread may do so."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """The bytes of some samples, in one call."""


class _SelectedStore(Store):
    """Some `rows` (N,) of another store, in this order."""

    def __init__(self, store: Store, rows: IntArray) -> None:
        self._store, self._rows = store, rows

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        return self._store.read([int(self._rows[row]) for row in rows])


@dataclass(frozen=True)
class SourceRows:
    """One source of a joined index. Its `count` rows follow those of the previous source.

    Attributes:
        weight: its share of a batch is this weight over the sum of all weights.
    """

    name: str
    count: int
    weight: float


ROWS: Final[dict[str, tuple[tuple[int, ...], str]]] = {
    "box_px": ((3,), "f"), "keypoints_px": ((len(HAND), 2), "f"), "mirror": ((), "b"), "group": ((), "iu"),
    "labelled_size_px": ((2,), "f"), "K": ((3, 3), "f"), "xyz_m": ((len(HAND), 3), "f"), "scale_m": ((), "f"),
    "xyz_px": ((len(HAND), 3), "f"),
}  # fmt: skip
"""The shape of a row of an array or target, and the kinds of its numbers, by NumPy's letters."""
_KINDS: Final = {"f": "floats", "b": "bools", "i": "integers"}


@dataclass(frozen=True)
class Index:
    """The N samples of a source: files, boxes and labels.

    Attributes:
        name: name of the source, for messages.
        root: folder that `paths` are relative to, or the text of an address.
        paths: (N,) file names; with a store, the names of its samples.
        box_px: (N, 3) float32, centre x, centre y and side of the square around the hand, in pixels of the image as
            decoded (EXIF orientation applied), corner-based (the centre of the first pixel is 0.5, 0.5). A side of 0
            means the square around the whole image.
        keypoints_px: (N, K, 2) float32 in the same frame, or None; the K keypoints of `HAND`. Pictures show them;
            pre-training reads them only for a loss that needs them. A keypoint that is not known is NaN.
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
            - "scale_m" (N,), metres, length of the reference bone, which scale-normalised poses take as 1.
            - "xyz_px" (N, K, 3), where no camera is known: `keypoints_px` and a depth in the same unit (weak
              perspective), so a pose up to scale and shift.

        sources: the sources of a joined index, in the order of its rows; empty for a single source.
        store: reads the bytes of a sample; None if each sample is a file at `paths`.
        partners: the admissible second images of pairs; None: both views of a pair show the same image.
        label_file: the file or files of the labels, for messages; "" if there are none.
        labelled_size_px: (N, 2) float32 width and height of the images that the labels are made for, NaN where they are
            not known; or None.
        one_size: whether all images have one size, that of the cameras.
    """

    name: str
    root: Path | str
    paths: Sequence[str]
    box_px: FloatArray
    keypoints_px: FloatArray | None = None
    mirror: BoolArray | None = None
    group: IntArray | None = None
    targets: dict[str, FloatArray] = field(default_factory=dict)
    sources: tuple[SourceRows, ...] = ()
    store: Store | None = None
    partners: Partners | None = None
    label_file: str = ""
    labelled_size_px: FloatArray | None = None
    one_size: bool = False

    def __post_init__(self) -> None:
        count = len(self.paths)
        if self.store is None:  # a change of the working folder changes no file
            object.__setattr__(self, "root", Path(self.root).absolute())
        for name, array in self.tables.items():
            row, kinds = ROWS.get(name, (np.shape(array)[1:], "fiub"))
            if not isinstance(array, np.ndarray) or array.shape != (count, *row) or array.dtype.kind not in kinds:
                found = f"{np.shape(array)} of {getattr(array, 'dtype', type(array).__name__)}"
                expected = f"a NumPy array {(count, *row)} of {_KINDS[kinds[0]]}"
                raise ValueError(f"{self.name}: {name} is {found}, expected {expected}")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def tables(self) -> dict[str, Any]:
        """The arrays with a row for each sample that there are, by name; also the targets."""
        arrays = {name: getattr(self, name, None) for name in ROWS}
        return {name: array for name, array in arrays.items() if array is not None} | self.targets

    @property
    def counts(self) -> list[int]:
        """Samples of each source."""
        return [source.count for source in self.sources] or [len(self)]

    @property
    def mirrored(self) -> BoolArray:
        """(N,) bool, `mirror` as an array also if it is None."""
        return np.zeros(len(self), bool) if self.mirror is None else self.mirror

    @property
    def groups(self) -> IntArray:
        """(N,) int64, `group` as an array also if it is None."""
        return np.arange(len(self)) if self.group is None else self.group

    def in_words(self) -> str:
        """Counts of images and checksums of file names and boxes: alike on two hosts with the same images.

        Names are taken without their folders.
        """
        names = "\n".join(path.rpartition("/")[2] for path in self.paths).encode(errors="surrogateescape")
        files, boxes = zlib.crc32(names), zlib.crc32(np.ascontiguousarray(self.box_px).data)
        return f"{' + '.join(map(str, self.counts))} images (checksums {files:08x} of names, {boxes:08x} of boxes)"

    def select(self, rows: IntArray) -> "Index":
        """The index of the samples at `rows`, in this order, or of a mask's. The index must have a single source."""
        if self.sources:
            raise ValueError(f"{self.name}: select rows of each source before the sources are joined")
        rows = np.arange(len(self))[rows]
        chosen = {name: array[rows] for name, array in self.tables.items() if name not in self.targets}
        return replace(
            self,
            paths=[self.paths[row] for row in rows.tolist()],
            **chosen,
            targets={name: array[rows] for name, array in self.targets.items()},
            store=None if self.store is None else _SelectedStore(self.store, rows),
            partners=None if self.partners is None else self.partners.select(rows),
        )

    def path(self, sample: int) -> Path:
        """Full path of one sample's file."""
        return Path(self.root) / self.paths[sample]

    def location(self, sample: int) -> str:
        """Full path or address of one sample, for messages."""
        name = self.paths[sample]
        return name if is_address(name) else os.path.join(self.root, name)  # noqa: PTH118  Path("s3://a") is "s3:/a"

    def read(self, sample: int) -> bytes:
        """Read the bytes of one sample's file; any thread may call it.

        Raises:
            OSError: it cannot be read; the file is at fault.
            UserError: the machine is at fault, as without memory or with too many open files.
        """
        data = next(self.read_many([sample]))
        if isinstance(data, OSError):
            raise data
        return data

    def read_many(self, samples: Sequence[int]) -> Iterator[Bytes]:
        """Read the bytes of some samples: from a store in one call, else file by file. A `UserError` as in `read`."""
        read: Iterable[Bytes] = (read_or_error(f"{self.root}/{self.paths[sample]}") for sample in samples)
        if self.store is not None:
            read = self.store.read(samples)
        for sample, data in zip(samples, read, strict=True):
            if isinstance(data, OSError) and data.errno not in _FAULTS_OF_A_FILE:
                raise UserError(
                    f"{self.location(sample)}: {data.strerror}. This may be an error of the machine, so the image is "
                    "not replaced. Check memory, disk, network and 'ulimit -n'; a run goes on with --resume auto. If "
                    "only this file cannot be read, replace or remove it."
                ) from data
            yield data


def project_px(intrinsics: AnyArray, xyz_m: AnyArray) -> AnyArray:
    """Project points (N, K, 3) to pixels (N, K, 2) by (N, 3, 3) or (3, 3). Points behind the camera give NaN."""
    homogeneous = xyz_m @ np.swapaxes(intrinsics, -1, -2)
    return np.asarray(homogeneous[..., :2] / np.where(homogeneous[..., 2:] > 0, homogeneous[..., 2:], np.nan))


def squares_around(low_px: DoubleArray, high_px: DoubleArray) -> FloatArray:
    """Squares (N, 3), centre x, centre y and side, around rectangles given by two corners (N, 2).

    A square has the rectangle's centre and its longer side; pixels, corner-based.
    """
    side_px = (high_px - low_px).max(axis=1, keepdims=True)
    return np.concatenate([(low_px + high_px) / 2, side_px], axis=1).astype(np.float32)


def read_or_error(path: str) -> Bytes:
    """The bytes of a file, or why it cannot be read; see `read_file`."""
    try:
        return read_file(path)
    except OSError as error:
        return error


def read_file(path: str) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read, is empty or larger than `MAX_FILE_BYTES`, or is a pipe or device, which might never
            end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # a file object for a folder's descriptor would raise without closing it
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if not found.st_size:  # also of the kernel's own files, such as /proc/kmsg, whose reading may never end
            raise OSError("empty file")
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
    """
    if len(indices) == 1:
        return indices[0]
    roots = [str(index.root) for index in indices]
    folders = [root if is_address(root) else os.path.abspath(root) for root in roots]  # noqa: PTH100  links stay
    root = " + ".join(folders)
    if not any(is_address(root) for root in roots):
        root = os.path.commonpath(folders)
        folders = [os.path.relpath(folder, root) for folder in folders]
    counts = [len(index) for index in indices]
    return Index(
        name=" + ".join(index.name for index in indices),
        root=root,
        paths=[f"{folder}/{path}" for folder, index in zip(folders, indices, strict=True) for path in index.paths],
        box_px=np.concatenate([index.box_px for index in indices]),
        keypoints_px=_join_tables([index.keypoints_px for index in indices], counts),
        mirror=_join_tables([index.mirror for index in indices], counts, missing=False),
        group=_join_groups(indices),
        targets=_join_targets(indices, counts),
        sources=tuple(
            SourceRows(index.name, len(index), weight) for index, weight in zip(indices, weights, strict=True)
        ),
        store=_JoinedStore(indices) if any(index.store is not None for index in indices) else None,
        partners=Partners.joined([index.partners for index in indices], counts),
    )


class _JoinedStore(Store):
    """The rows of several sources, one after the other; each source reads its own in one call."""

    def __init__(self, indices: Sequence[Index]) -> None:
        self._indices = indices
        self._first = [0, *accumulate(len(index) for index in indices)]

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        """See `Store`."""
        read: dict[int, Bytes] = {}
        for index, first, end in zip(self._indices, self._first, self._first[1:], strict=False):
            own = [row for row in rows if first <= row < end]
            if own:
                read |= zip(own, index.read_many([row - first for row in own]), strict=True)
        return [read[row] for row in rows]


def _join_targets(indices: Sequence[Index], counts: Sequence[int]) -> dict[str, FloatArray]:
    """Join the targets that all sources have, and "K" and "xyz_m" if all have keypoints and one has the target."""
    shared = [name for name in indices[0].targets if all(name in index.targets for index in indices)]
    with_keypoints = ["K", "xyz_m"] if all(index.keypoints_px is not None for index in indices) else []
    tables = {
        name: _join_tables([index.targets.get(name) for index in indices], counts)
        for name in dict.fromkeys(with_keypoints + shared)
    }
    return {name: table for name, table in tables.items() if table is not None}


def _join_tables(
    tables: Sequence[AnyArray | None], counts: Sequence[int], *, missing: float = np.nan
) -> AnyArray | None:
    """Concatenate tables. A table that is None is filled with `missing`; the result is None if all are None."""
    known = next((table for table in tables if table is not None), None)
    if known is None:
        return None
    return np.concatenate([
        np.full((count, *known.shape[1:]), missing, known.dtype) if table is None else table
        for table, count in zip(tables, counts, strict=True)
    ])  # fmt: skip


def _join_groups(indices: Sequence[Index]) -> IntArray | None:
    """Join the groups; groups of different sources stay different."""
    if all(index.group is None for index in indices):
        return None
    groups, first = [], 0
    for index in indices:
        group = np.unique(index.groups, return_inverse=True)[1]
        groups.append(group + first)
        first += int(group.max(initial=-1)) + 1
    return np.concatenate(groups)

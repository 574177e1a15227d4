"""Images that are kept decoded, in memory that is mapped to files."""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from pipelines.arrays import IntArray
from pipelines.views.augmentation import GeometryConfig
from pipelines.views.plan import SMALLEST_SIDE, KeptRegions
from pipelines.views.reach import reach_of

log = logging.getLogger(__name__)

KEPT: Final = np.dtype([
    ("offset", "<u8"), ("crc32", "<u4"), ("size_px", "<i4", 2), ("orientation", "u1"),
    ("start_px", "<i4", 2), ("shape_px", "<i4", 2), ("halvings", "u1"),
])  # fmt: skip
"""A row for each sample: its first byte in its shard and the checksum of its pixels; height and width of the image as
the decoder gives it, and its Exif orientation; the region that was kept, as in `pipelines.views.plan.KeptRegions`."""

_OTHERS: Final = ("rotation_deg", "translation_frac", "scale", "scale_is", "crop_probability", "crop_side_frac")
"""Keys of `geometry` that say what a view may show, besides its side."""


@dataclass(frozen=True)
class ViewLimits:
    """Limits of the views that can be made from the kept pixels of a source.

    Attributes:
        root: folder of the source, for messages.
        geometry, box_margin, backend: what its pixels were kept for.
        margin: `data.box_margin` of this run.
        boxed, whole: whether samples have boxes; whether there are some whose box is the whole image, without margin.
        cut: whether regions of images were kept.
        halved: whether some were halved.
    """

    root: Path
    geometry: GeometryConfig
    box_margin: float
    backend: str
    margin: float
    boxed: bool
    whole: bool
    cut: bool
    halved: bool

    def require(self, geometry: GeometryConfig) -> None:
        """Check that views of this geometry are the same as from the files.

        Raises:
            UserError: they need pixels that were not kept.
        """
        kept, wanted = reach_of(self.geometry), reach_of(geometry)
        margins = [(self.box_margin, self.margin)] * self.boxed + [(1.0, 1.0)] * self.whole
        if geometry.antialias != self.geometry.antialias:
            raise self._refusal(geometry, ["antialias"], "are sampled otherwise")
        if self.halved and geometry.fill != self.geometry.fill:
            raise self._refusal(geometry, ["fill"], "have another border")
        for packed, here in margins:
            if self.cut and wanted.side * here > kept.side * packed:
                raise self._refusal(geometry, _OTHERS, "show more of the images")
            if self.halved and wanted.most_px / here > kept.most_px / packed:
                raise self._refusal(geometry, ["side_px", *_OTHERS], "magnify the images more")
            if self.cut and geometry.antialias and wanted.least_px / here < SMALLEST_SIDE * kept.least_px / packed:
                raise self._refusal(geometry, ["side_px", *_OTHERS], "make the images smaller")

    def warn_of_backend(self, backend: str) -> None:
        """Log a line if pixels were halved by another backend than that of this run."""
        if self.halved and backend != self.backend:
            _warn_of_backend(self.root, self.backend, backend)

    def _refusal(self, geometry: GeometryConfig, keys: Sequence[str], need: str) -> UserError:
        pairs = [(f"geometry.{key}", getattr(geometry, key), getattr(self.geometry, key)) for key in keys]
        pairs.append(("data.box_margin", self.margin, self.box_margin))
        told = ", ".join(f"{key} = {_plain(here)} (packed: {_plain(packed)})" for key, here, packed in pairs
                         if here != packed)  # fmt: skip
        return UserError(
            f"{self.root}: these views {need} than its pixels were packed for: {told}. Stay within what was packed, or "
            "pack again with these values"
        )


@cache  # a run makes several loaders
def _warn_of_backend(root: Path, packed: str, here: str) -> None:
    log.warning(
        "%s: its pixels were packed with pipelines.backend = %r, and this run uses %r: where they were halved, views "
        "differ from those of the files by up to 2 levels. Use the same, or pack again",
        root, packed, here,
    )  # fmt: skip


@dataclass(frozen=True)
class KeptPixels:
    """The pixels of N samples.

    Attributes:
        table: (N,) `KEPT`.
        address: (N,) int64, of the first byte of each in memory. RGB, rows without gaps, as stored: not turned upright.
        limits: of each source.
        memory: objects that hold the memory at the addresses.
    """

    table: npt.NDArray[np.void]
    address: IntArray
    limits: tuple[ViewLimits, ...]
    memory: tuple[Any, ...]

    def select(self, rows: IntArray) -> KeptPixels:
        """The pixels of some samples."""
        return replace(self, table=self.table[rows], address=self.address[rows])

    def require(self, geometry: GeometryConfig) -> None:
        """Raise a `UserError` if views of this geometry need pixels that were not kept."""
        for one in self.limits:
            one.require(geometry)

    def warn_of_backend(self, backend: str) -> None:
        """Log a line for each source whose pixels were halved by another backend."""
        for one in self.limits:
            one.warn_of_backend(backend)

    def matches(self, sample: int) -> bool:
        """Whether the pixels of a sample are those that were packed, by their checksum."""
        pixels = pixels_at(int(self.address[sample]), self.table["shape_px"][sample])
        return zlib.crc32(pixels.data) == int(self.table["crc32"][sample])


def join_pixels(parts: Sequence[KeptPixels]) -> KeptPixels:
    """The pixels of several sources, one after the other."""
    columns = [[getattr(part, field.name) for part in parts] for field in fields(KeptPixels)]
    table, address, limits, memory = columns
    return KeptPixels(np.concatenate(table), np.concatenate(address), sum(limits, ()), sum(memory, ()))


def kept_regions(table: npt.NDArray[np.void]) -> KeptRegions:
    """The regions in rows (N,) of `KEPT`."""
    return KeptRegions(*(table[name].astype(np.int64) for name in KeptRegions._fields))


def pixels_at(address: int, shape_px: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint8]:
    """The RGB image (H, W, 3) at an address. The array does not keep the memory alive."""
    height, width = map(int, shape_px)
    memory = (ctypes.c_uint8 * (3 * height * width)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(height, width, 3)


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)

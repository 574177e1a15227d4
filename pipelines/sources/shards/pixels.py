"""Shards of pixels: images that are kept decoded, so that a loader neither reads files nor decodes them.

A shard is nothing but the pixels of its samples, one after the other. The table "pixels" of the index says where and
what they are; `index.json` says for which views they were kept.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from errors import UserError
from pipelines.config import DataConfig
from pipelines.files.image_file import MIN_PIXELS
from pipelines.samples.kept_pixels import KeptPixels, ViewLimits
from pipelines.samples.store import Store
from pipelines.views.augmentation import GeometryConfig

PIXELS: Final = "pixels"
"""In index.json: the "kind" of these shards, and the key with the views that they were packed for. Also the name of
their table."""

ENDING: Final = "rgb"


def packed_for(geometry: GeometryConfig, box_margin: float, backend: str) -> dict[str, Any]:
    """Entries of index.json: the views that the pixels were kept for, and the backend whose rounding halved them."""
    as_json = TypeAdapter(GeometryConfig).dump_python(geometry, mode="json")
    return {"geometry": as_json, "box_margin": box_margin, "backend": backend}


def map_pixels(
    root: Path,
    content: Mapping[str, Any],
    first: Sequence[int],
    table: npt.NDArray[np.void],
    box_px: npt.NDArray[np.float32],
    config: DataConfig,
) -> KeptPixels:
    """Map shards of pixels into memory.

    Args:
        content: of `index.json`; the sizes of the shards have been compared.
        first: (shards + 1,) first row of each shard, and the end of the last.
        table: (N,) `KEPT`.
        box_px: (N, 3) boxes without margin.

    Raises:
        UserError: the index has pixels where there are none, or a shard cannot be mapped.
    """
    try:
        geometry = TypeAdapter(GeometryConfig).validate_python(content[PIXELS]["geometry"])
        box_margin = float(content[PIXELS]["box_margin"])
        backend = str(content[PIXELS]["backend"]).replace("opencv", "cpu")  # its name in earlier versions
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise UserError(f"{root}: index.json does not say for which views its pixels are. Pack again.") from error
    table = np.array(table)
    address, memory = np.empty(len(table), np.int64), []
    stored_px = table["shape_px"].astype(np.int64)
    size = 3 * stored_px.prod(axis=1)
    for shard, (start, stop) in zip(content["shards"], pairwise(first), strict=True):
        rows = slice(start, stop)
        offset = table["offset"][rows]
        # The kernel reads by address, so nothing may lie outside.
        inside = (stored_px[rows] > 0).all() and (size[rows] >= 3 * MIN_PIXELS).all()
        inside = inside and (size[rows] <= shard["bytes"]).all()
        if not inside or (offset > shard["bytes"] - size[rows].astype(np.uint64)).any():
            raise UserError(f"{root}: the index has pixels outside of {shard['file']}. Copy the folder, or pack again.")
        if stop > start:
            memory.append(_mapped(root / shard["file"]))
            address[rows] = memory[-1].ctypes.data + offset.astype(np.int64)
    whole = box_px[:, 2] == 0
    kept_px = stored_px << table["halvings"][:, None].astype(np.int64)
    limits = ViewLimits(
        root,
        geometry,
        box_margin,
        backend,
        config.box_margin,
        boxed=not whole.all(),
        whole=bool(whole.any()),
        cut=bool((kept_px < table["size_px"]).any()),
        halved=bool(table["halvings"].any()),
    )
    return KeptPixels(table, address, (limits,), tuple(memory))


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot be mapped into memory ({error.strerror}). Check it, or pack again.") from error


class PixelNames(Store):
    """Takes the place of a `ShardStore` for shards of pixels, which hold no files.

    Args:
        first: (len(shards) + 1,) first row of each shard, and the end of the last.
    """

    def __init__(self, shards: Sequence[str], first: Sequence[int]) -> None:
        self._shards, self._first = shards, first

    def name(self, sample: int) -> str:
        """Shard and row of a sample, for messages."""
        return f"{self._shards[bisect_right(self._first, sample) - 1]}/{sample:09d}"

    def read(self, row: int) -> bytes:
        """Refuse to read a file.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"{self.name(row)} holds pixels, not image files. Only training and its validation can use them: for "
            "anything else, name the data that was packed"
        )

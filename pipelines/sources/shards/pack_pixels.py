"""Writes shards of pixels: the region of each image that views can reach, decoded and halved."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from nvidia.dali import Pipeline

from errors import UserError
from errors.refused import as_size
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage, ImageFile
from pipelines.render.dali_graph import GraphConfig, decode_pipeline, halving_pipeline
from pipelines.render.request import Request
from pipelines.render.runner import decode_error
from pipelines.samples.index import Index
from pipelines.samples.kept_pixels import KEPT
from pipelines.sources.shards.index_file import index_tables
from pipelines.sources.shards.pixels import ENDING, PIXELS, packed_for
from pipelines.sources.shards.tar import HashingFile, Written
from pipelines.views.augmentation import GeometryConfig
from pipelines.views.plan import Plan, keep
from writing import whole_file

Image = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]

_MEASURED_AT_ONCE = 256
"""Files measured by a thread at a time."""


class PixelContents:
    """Writes shards of pixels.

    Args:
        index: of one source, its boxes without margin.
        geometry, box_margin, backend: of the runs that will read the shards. The graph and the kernel round the mean of
            four pixels differently, so each halves for itself.
        say: gets a line that says how large the shards will be, before the first is written.
        progress: makes a line of progress with this title.
    """

    ending = ENDING

    def __init__(
        self,
        index: Index,
        geometry: GeometryConfig,
        box_margin: float,
        backend: Literal["dali", "cpu"],
        *,
        say: Callable[[str], None],
        progress: Callable[[str], AbstractContextManager[Progress]],
    ) -> None:
        if index.pixels is not None:
            raise UserError(f"{index.root} holds pixels already: pack the data that they were made from")
        for_views = packed_for(geometry, box_margin, backend)
        self.job: dict[str, Any] = {PIXELS: for_views}
        self.notes: dict[str, Any] = {"kind": PIXELS, PIXELS: for_views}
        self._index, self._geometry, self._say, self._progress = index, geometry, say, progress
        self._by_graph = backend == "dali"
        self._box_px = index.box_px.copy()
        self._box_px[:, 2] *= box_margin
        self._table = np.zeros(len(index), KEPT)
        self._reasons: dict[int, str] = {}

    def prepare(self, parts: Path, workers: int) -> None:
        """Measure all files, say how large the shards will be, and refuse if the disk has not that much room.

        Raises:
            UserError: there is too little room.
        """
        self._measure(parts / "sizes.npz", workers)
        good = self._table["orientation"] > 0
        kept = keep(
            self._table["size_px"][good].astype(np.int64),
            self._table["orientation"][good],
            self._box_px[good],
            self._geometry,
        )
        for name, column in kept._asdict().items():
            self._table[name][good] = column
        out = parts.parent
        size = 3 * int(kept.shape_px.prod(axis=1).sum())
        written = sum(file.stat().st_size for file in out.glob(f"*.{ENDING}"))
        tables = sum(table.nbytes for table in [self._table, *index_tables(self._index).values()])
        free = shutil.disk_usage(out).free
        self._say(f"{out}: the pixels of {good.sum()} images take {as_size(size)}; {as_size(free + written)} are free")
        if size + 2 * tables > free + written:
            raise UserError(
                f"{out}: the pixels take {as_size(size)}, and {as_size(free + written)} are free. Make room, name "
                "another disk, or pack for smaller views: geometry.side_px, geometry.scale, data.box_margin"
            )

    def _measure(self, file: Path, workers: int) -> None:
        """Read size and orientation of all images, or take what an earlier call found."""
        table, count = self._table, len(self._table)
        try:
            with np.load(file) as found:
                table["size_px"], table["orientation"] = found["size_px"], found["orientation"]
                self._reasons = {int(row): reason for row, reason in json.loads(found["reasons"].tobytes()).items()}
                return
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass

        def measure(start: int) -> int:
            stop = min(start + _MEASURED_AT_ONCE, count)
            for row in range(start, stop):
                try:
                    image = check_image(self._index.read(row))
                except (OSError, BadImage) as error:
                    self._reasons[row] = str(error)
                else:
                    table[row]["size_px"], table[row]["orientation"] = image.size_px, image.orientation
            return stop

        with ThreadPoolExecutor(workers, "measure") as pool, self._progress("measuring") as progress:
            try:
                for done in pool.map(measure, range(0, count, _MEASURED_AT_ONCE)):
                    progress(done, count)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        reasons = np.frombuffer(json.dumps(self._reasons).encode(), np.uint8)
        with whole_file(file) as out:
            np.savez(out, size_px=table["size_px"], orientation=table["orientation"], reasons=reasons)

    def write(self, rows: range, shard: HashingFile, stop: Callable[[], bool]) -> Written:
        """Write the rows of a shard, see `pipelines.sources.shards.pack.Contents`."""
        decode, kept, left_out = _Decoder(self._geometry.fill), [], []
        for row in rows:
            if stop():
                break
            try:
                pixels = self._pixels(row, decode)
            except (OSError, BadImage) as error:
                left_out.append({"path": str(self._index.path(row)), "reason": str(error)})
                continue
            kept.append(row)
            self._table[row]["offset"], self._table[row]["crc32"] = shard.written, zlib.crc32(pixels.data)
            shard.write(pixels.data.cast("B"))
        return Written(kept, {PIXELS: self._table[kept]}, left_out)

    def _pixels(self, row: int, decode: _Decoder) -> Image:
        """What is kept of an image. One that cannot be used is an `OSError` or `BadImage`."""
        if row in self._reasons:
            raise BadImage(self._reasons[row])
        kept, image = self._table[row], check_image(self._index.read(row))
        if (*image.size_px, image.orientation) != (*kept["size_px"], kept["orientation"]):
            raise BadImage("it has changed since it was measured")
        by_graph = int(kept["halvings"]) if self._by_graph else 0
        others = int(kept["halvings"]) - by_graph
        start_px = kept["start_px"] >> by_graph
        (top, left), (below, right) = start_px, start_px + (kept["shape_px"] << others)  # or beyond the image
        pixels = decode(image, by_graph)[top:below, left:right]
        for _ in range(others):
            pixels = _halved(pixels, self._geometry.fill)
        return np.ascontiguousarray(pixels)


def _halved(image: Image, fill: int | Literal["edge"]) -> Image:
    """Halve an image (H, W, 3) as the kernel does. An odd last row or column is halved together with the border."""
    height, width, _ = image.shape
    odd = ((0, height % 2), (0, width % 2), (0, 0))
    padded = np.pad(image, odd, "edge") if fill == "edge" else np.pad(image, odd, constant_values=fill)
    blocks = padded.reshape(-(-height // 2), 2, -(-width // 2), 2, 3)
    sums: npt.NDArray[np.uint16] = blocks.sum(axis=(1, 3), dtype=np.uint16)
    return np.asarray((sums + 2) >> 2, np.uint8)


class _Decoder:
    """Decodes one image after the other, as the loader does on a CPU. For one thread.

    Args:
        fill: `geometry.fill`, for halving.
    """

    def __init__(self, fill: int | Literal["edge"]) -> None:
        self._fill = fill
        self._pipelines: dict[int, Pipeline] = {}  # by their number of halvings

    def _pipeline(self, halvings: int) -> Pipeline:
        if halvings not in self._pipelines:
            graph = GraphConfig("cpu", None, batch=1, threads=1, prefetch=1, views=1)
            make = partial(halving_pipeline, halvings=halvings, fill=self._fill) if halvings else decode_pipeline
            self._pipelines[halvings] = make(graph, lambda: self._request)
        return self._pipelines[halvings]

    def __call__(self, image: ImageFile, halvings: int) -> Image:
        """The image (H, W, 3) as stored, halved by the graph.

        Raises:
            BadImage: it does not decode.
            UserError: memory is short.
        """
        whole = Plan(np.zeros((1, 2), np.int64), np.array([image.size_px]), ())
        self._request = Request([image.encoded], whole)
        try:
            (images,) = self._pipeline(halvings).run()
        except RuntimeError as error:
            if isinstance(told := decode_error(error), UserError):
                raise told from error
            raise BadImage("its compressed data does not decode") from error
        return np.asarray(images[0])

"""FFCV as a peer, if it is installed: its packed file, its decoder, and our operation that makes the two views.

FFCV has neither rotation nor hue, so the views are a custom operation compiled by Numba, as FFCV's documentation
recommends.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import numpy.typing as npt
from ffcv.fields import RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.operation import Operation
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter
from numba import njit

from peclr_dali.bench.loaders.peers import paper_draws as ranges
from peclr_dali.bench.loaders.peers.paper_draws import BoxArray

_FOLDER: Final = Path(".data/bench-ffcv")
_LAPS: Final = 200
"""Epochs in one pass of FFCV's loader, so that restarts between epochs are not measured."""


class JpegField(RGBImageField):  # type: ignore[misc]  # FFCV carries no types
    """A field with the bytes of a JPEG file, not encoded again."""

    raw = False

    def encode(self, destination: Any, image: npt.NDArray[np.uint8], malloc: Callable[[int], Any]) -> None:
        """Store one JPEG file, or its pixels."""
        pixels = cv2.cvtColor(cv2.imdecode(image, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)  # type: ignore[arg-type]
        stored = pixels.reshape(-1) if self.raw else image
        destination["mode"] = IMAGE_MODES["raw" if self.raw else "jpg"]
        destination["height"], destination["width"] = pixels.shape[:2]
        destination["data_ptr"], storage = malloc(stored.nbytes)
        storage[:] = stored

    @classmethod
    def from_binary(cls, binary: Any) -> JpegField:
        """The field of a file."""
        return cls()


class RawField(JpegField):
    """A field with the decoded pixels, FFCV's mode "raw"."""

    raw = True


class TwoViews(Operation):  # type: ignore[misc]
    """(N, H, W, 3) decoded images to (N, 2, 128, 128, 3) views."""

    def __init__(self, boxes_px: BoxArray) -> None:
        super().__init__()
        self._boxes_px = boxes_px

    def generate_code(self) -> Callable[..., Any]:
        """The function that FFCV compiles."""
        boxes_px, side, loop = self._boxes_px, ranges.VIEW_PX, Compiler.get_iterator()
        low, span = ranges.RANGES[:, 0].copy(), np.ptp(ranges.RANGES, axis=1)

        def two_views(images: Any, out: Any, indices: Any) -> Any:
            for row in loop(len(indices)):
                for view in range(2):
                    draw = low + np.random.rand(len(low)) * span  # noqa: NPY002  Numba's own
                    make_view(images[row], boxes_px[indices[row]], draw, out[row, view], side)
            return out[: len(indices)]

        two_views.is_parallel = True  # type: ignore[attr-defined]
        two_views.with_indices = True  # type: ignore[attr-defined]
        return two_views

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        """Shape and type of the output."""
        shape = (2, ranges.VIEW_PX, ranges.VIEW_PX, 3)
        return replace(previous_state, shape=shape, jit_mode=True), AllocationQuery(shape, np.dtype("u1"))


@njit(nogil=True, fastmath=True, error_model="numpy")  # type: ignore[untyped-decorator]
def make_view(image: Any, box_px: Any, draw: Any, out: Any, side: int) -> None:
    """Warp bilinearly from source to view and jitter in HSV; black beyond the image.

    Args:
        image: (H, W, 3) uint8.
        box_px: (3,) centre x, centre y, side; side 0 is the square around the whole image.
        draw: (8,) in the order of `PeerDraw`.
        out: (side, side, 3) uint8, written to.
        side: side of the view.
    """
    height, width = image.shape[0], image.shape[1]
    center_x, center_y, box = float(box_px[0]), float(box_px[1]), float(box_px[2])
    if box == 0.0:
        center_x, center_y, box = width / 2, height / 2, float(max(width, height))
    angle = math.radians(draw[0])
    per_px = box / (side * draw[3])
    cosine, sine = per_px * math.cos(angle), per_px * math.sin(angle)
    for v in range(side):
        for u in range(side):
            du = u + 0.5 - side * (0.5 + draw[1])
            dv = v + 0.5 - side * (0.5 + draw[2])
            x = center_x + cosine * du + sine * dv - 0.5
            y = center_y - sine * du + cosine * dv - 0.5
            left, top = math.floor(x), math.floor(y)
            fx, fy = x - left, y - top
            red = green = blue = 0.0
            if 0 <= left < width - 1 and 0 <= top < height - 1:
                a, b, c, d = (1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy
                upper, lower = image[top], image[top + 1]
                red = a * upper[left, 0] + b * upper[left + 1, 0] + c * lower[left, 0] + d * lower[left + 1, 0]
                green = a * upper[left, 1] + b * upper[left + 1, 1] + c * lower[left, 1] + d * lower[left + 1, 1]
                blue = a * upper[left, 2] + b * upper[left + 1, 2] + c * lower[left, 2] + d * lower[left + 1, 2]
            else:
                for row in range(max(top, 0), min(top + 2, height)):
                    for column in range(max(left, 0), min(left + 2, width)):
                        weight = (1 - abs(x - column)) * (1 - abs(y - row))
                        red += weight * image[row, column, 0]
                        green += weight * image[row, column, 1]
                        blue += weight * image[row, column, 2]
            value, least = max(red, green, blue), min(red, green, blue)
            chroma = value - least
            if chroma == 0.0:
                sixths = 0.0
            elif value == red:
                sixths = (green - blue) / chroma
                if sixths < 0.0:
                    sixths += 6.0
            elif value == green:
                sixths = (blue - red) / chroma + 2.0
            else:
                sixths = (red - green) / chroma + 4.0
            sixths *= draw[4]
            saturation = draw[5] * chroma / value if value > 0.0 else 0.0
            value = min(value * draw[6] + 255.0 * draw[7], 255.0)
            chroma = value * saturation
            for channel in range(3):
                k = 5.0 - 2.0 * channel + sixths
                k = k - 6.0 if k >= 6.0 else k
                out[v, u, channel] = int(value - chroma * max(0.0, min(k, 4.0 - k, 1.0)) + 0.5)


def batches(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Any]:
    """Endless batches of two views, made by FFCV in `threads` threads."""
    return _batches(_loader(tuple(paths), boxes_px.tobytes(), threads, batch, JpegField))


def raw_batches(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Any]:
    """The same from a file of decoded pixels."""
    return _batches(_loader(tuple(paths), boxes_px.tobytes(), threads, batch, RawField))


def _batches(loader: Any) -> Iterator[Any]:
    while True:
        epochs = iter(loader)
        try:
            yield from epochs
        finally:
            epochs.close()
            epochs.join()


@lru_cache(maxsize=2)  # FFCV compiles for each loader
def _loader(paths: tuple[Path, ...], boxes_px: bytes, threads: int, batch: int, field: type[JpegField]) -> Any:
    boxes = np.frombuffer(boxes_px, np.float32).reshape(-1, 3).copy()
    return Loader(
        str(_packed(paths, field)),
        batch_size=batch,
        num_workers=threads,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.tile(np.arange(len(paths), dtype=np.uint64), _LAPS),
        pipelines={"image": [SimpleRGBImageDecoder(), TwoViews(boxes), ToTensor()]},
        custom_fields={"image": field},
    )


def _packed(paths: tuple[Path, ...], field: type[JpegField]) -> Path:
    """Path of FFCV's file of these images; it is written at the first call."""
    names = hashlib.sha256("\n".join(f"{path} {path.stat().st_size}" for path in paths).encode()).hexdigest()
    file = _FOLDER / f"{names[:16]}-{field.__name__}.beton"
    if not file.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        # FFCV forks, which is unsafe beside DALI's threads, so it writes in a fresh process.
        writer = multiprocessing.get_context("spawn").Process(
            target=_write, args=(paths, file.with_suffix(".part"), field)
        )
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            raise RuntimeError(f"FFCV could not write {file}")
        file.with_suffix(".part").rename(file)
    return file


def _write(paths: Sequence[Path], file: Path, field: type[JpegField]) -> None:
    files = [(np.fromfile(path, np.uint8),) for path in paths]
    DatasetWriter(str(file), {"image": field()}, num_workers=1).from_indexed_dataset(files)

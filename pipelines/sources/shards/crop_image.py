"""Stores of each image only the part that views can show, at the resolution that they can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import cv2
import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.render.chunk import Chunk, chunk_of
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.runner import raise_if_no_memory
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.sources.shards.crop import Crop
from peclr_dali.pipelines.views.plan import MAX_HALVINGS, reachable
from peclr_dali.pipelines.views.regions import LARGEST_SHARE

Image = npt.NDArray[np.uint8]
Labels = dict[str, npt.NDArray[Any]]
"""A sample's box, keypoints and targets, by the names of their tables in the index of shards."""

_ENCODING: Final = {
    "jpeg": (".jpg", [cv2.IMWRITE_JPEG_QUALITY, 95,
                      cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]),
    "png": (".png", []),
}  # fmt: skip
_UPSIDE_DOWN: Final = (3, 4, 7, 8)
_LEFT_FOR_RIGHT: Final = (2, 3, 6, 7)
"""Exif orientations that display the first stored row, or column, last; above 4, rows become columns before."""


class ImageCropper:
    """Crops one image after the other; for one thread."""

    def __init__(self, crop: Crop) -> None:
        self._crop = crop
        self._chunk: Chunk
        settings = Settings("cpu", "cpu", None, chunk_size=1, threads=1, prefetch=1)
        self._pipeline = decode_pipeline(settings, self._chunks())

    def _chunks(self) -> Iterator[Chunk]:
        while True:
            yield self._chunk

    def __call__(self, data: bytes, image: ImageFile, labels: Labels) -> tuple[bytes, Labels]:
        """The part of an image, turned upright and halved as often as all views halve it, and the labels that fit it.

        A file of which this would save nothing stays as it is.

        Args:
            data: the file.
            image: its checked content.
            labels: in pixels of the upright image; the box without margin.

        Raises:
            BadImage: it does not decode.
            UserError: memory is short.
        """
        geometry, margin = self._crop.geometry, self._crop.box_margin
        size_px = np.array(image.size_px if image.orientation <= 4 else image.size_px[::-1])
        box_px = labels["box_px"].astype(np.float64)
        if box_px[2] <= 0:  # the whole image has no margin
            box_px = np.array([size_px[1] / 2, size_px[0] / 2, size_px.max() / margin])
        # The blocks of pixels that views halve begin at the first stored pixel, which may be displayed last.
        is_reversed = np.array([image.orientation in _UPSIDE_DOWN, image.orientation in _LEFT_FOR_RIGHT])
        lead_px = is_reversed * (-size_px % 2**MAX_HALVINGS)
        wide_px = box_px * [1, 1, margin] + [*lead_px[::-1], 0]
        (start_px,), (stop_px,), (halvings,) = reachable((size_px + lead_px)[None], wide_px[None], geometry)
        if not halvings and (stop_px - start_px).prod() >= LARGEST_SHARE * size_px.prod():
            return data, labels
        upright = _turned_upright(self._decoded(image), image.orientation)
        filled = _padded(upright, lead_px, 0 * lead_px, geometry.fill)
        part, times = filled[start_px[0] : stop_px[0], start_px[1] : stop_px[1]], 2 ** int(halvings)
        ending, options = _ENCODING[self._crop.format]
        encoded = cv2.imencode(ending, _shrunk(part, times, geometry.fill)[..., ::-1], options)[1].tobytes()
        return encoded, _moved(labels | {"box_px": box_px}, (start_px - lead_px)[::-1], times)

    def _decoded(self, image: ImageFile) -> Image:
        """The stored RGB image (H, W, 3), as the loader decodes it: OpenCV would accept damaged files."""
        self._chunk = chunk_of([image])
        try:
            (images,) = self._pipeline.run()
        except RuntimeError as error:
            raise_if_no_memory(error)
            raise BadImage("its compressed data does not decode") from error
        return np.array(images.at(0))


def _turned_upright(image: Image, orientation: int) -> Image:
    """A stored image (H, W, 3) as Exif's orientation, 1 to 8, wants it displayed."""
    turned = image.transpose(1, 0, 2) if orientation > 4 else image
    turned = turned[::-1] if orientation in _UPSIDE_DOWN else turned
    return turned[:, ::-1] if orientation in _LEFT_FOR_RIGHT else turned


def _padded(image: Image, before: IntArray, after: IntArray, fill: int | Literal["edge"]) -> Image:
    """An image with rows and columns before and after it, filled as views are."""
    widths = [*zip(before, after, strict=True), (0, 0)]
    return np.pad(image, widths, "edge") if fill == "edge" else np.pad(image, widths, constant_values=fill)


def _shrunk(image: Image, times: int, fill: int | Literal["edge"]) -> Image:
    """The mean of each block of `times` x `times` pixels. An incomplete block at the border is filled as views are."""
    beyond = -np.array(image.shape[:2]) % times
    whole = _padded(image, 0 * beyond, beyond, fill)
    size = (whole.shape[1] // times, whole.shape[0] // times)
    return np.asarray(cv2.resize(whole, size, interpolation=cv2.INTER_AREA), np.uint8)


def _moved(labels: Labels, start_px: IntArray, times: int) -> Labels:
    """Labels in pixels of the part that begins at `start_px` (x, y) and is `times` smaller."""
    to_part = np.array([[1 / times, 0, -start_px[0] / times], [0, 1 / times, -start_px[1] / times], [0, 0, 1]])
    moved = dict(labels)
    for name in {"box_px", "keypoints_px", "target.xyz_px"} & labels.keys():  # x, y and, if any, a third length
        points = labels[name].astype(np.float64) / times
        points[..., :2] -= start_px / times
        moved[name] = points.astype(np.float32)
    if "target.K" in labels:
        moved["target.K"] = (to_part @ labels["target.K"]).astype(np.float32)
    return moved

"""What a view of an image must show, by Pillow, OpenCV and the oracle: nothing of the product is used here.

The view is the box of the image as displayed, shifted, sampled bilinearly, with black outside the image. Where it is to
be halved first, each halving takes the mean of 2 x 2 pixels, of black beyond an odd border.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.pipelines.image_parts import EXIF_START, ORIENTATION, PNG_START
from tests.pipelines.reference import halve, warp

T = TypeVar("T", np.uint8, np.float64)
Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float64]

MEAN_LEVELS: Final = 1.5
"""Largest mean difference of a view from what it must show, over the pixels inside the image.

Most files are within 0.3; CMYK and damaged scans, which libraries conceal in their own ways, take the most.
"""

MAX_LEVELS: Final = 4.0
"""Largest difference of a pixel and channel."""

MATRIX_PX: Final = 0.01
"""Largest difference of where the matrix puts a corner of the view."""


class Verdict(StrEnum):
    """How a view compares with the independent decoders."""

    SAME = "same"
    GARBLED = "garbled"
    WRONG_MATRIX = "wrong_matrix"
    UNJUDGED = "unjudged"  # the independent decoders refuse the file, or differ from each other


@dataclass(frozen=True)
class Opinion:
    """What independent decoders make of a file.

    Attributes:
        images: (H, W, 3) each, as stored, of the decoders that take the file.
        sizes_px: width and height as stored that any of them finds.
        orientation: the one that the file must be shown in.
    """

    images: tuple[Pixels, ...]
    sizes_px: tuple[tuple[int, int], ...]
    orientation: int


@dataclass(frozen=True)
class Judged:
    """A verdict, and how far the view is from the nearest of the images: mean and maximum, in levels.

    `turned_by` is the orientation, if any, that a garbled view has and must not have.
    """

    verdict: Verdict
    mean_levels: float = 0.0
    max_levels: float = 0.0
    turned_by: int | None = None


def opinion_of(data: bytes) -> Opinion:
    """Decode by Pillow and by OpenCV, and read the orientation.

    Where one of them refuses a PNG or a WebP for what is around its pixels, it gets the pixels alone.
    """
    images, sizes = [], []
    for decode in (_by_pillow, _by_opencv):
        image, size_px = decode(data)
        if image is None:
            image, size_px = decode(_pixels_only(data))
        if image is not None:
            images.append(image)
        if size_px is not None:
            sizes.append(size_px)
    images += _unmarked_cmyk(data)
    return Opinion(tuple(images), tuple(sizes), orientation_of(data))


def judge(
    opinion: Opinion, view: Pixels, matrix_px: Array, box_px: Array, shift_frac: Array, *, halves: bool = False
) -> Judged:
    """Compare a view.

    Args:
        opinion: of the file that it was made from.
        view: (S, S, 3).
        matrix_px: (2, 3) source-to-view matrix that came with it.
        box_px: (3,) centre x and y, side; side 0 is the square around the whole image.
        shift_frac: (2,) shift of the view in x and y, as a fraction of its side.
        halves: whether a view that minifies was made of a halved image.
    """
    nearest: Judged | None = None
    for image in opinion.images:
        shown = turned(image, opinion.orientation)
        expected, inside = expected_view(image, opinion.orientation, box_px, shift_frac, len(view), halves=halves)
        difference = np.abs(view - expected)
        mean, most = float(difference[inside].mean()) if inside.any() else 0.0, float(difference.max())
        right_matrix = _matrix_fits(shown.shape[1::-1], matrix_px, box_px, shift_frac, len(view))
        near = mean <= MEAN_LEVELS and most <= MAX_LEVELS
        if near and right_matrix:
            return Judged(Verdict.SAME, mean, most)
        if nearest is None or mean < nearest.mean_levels:
            nearest = Judged(Verdict.WRONG_MATRIX if near else Verdict.GARBLED, mean, most)
    if nearest is not None and all(_alike(opinion.images[0], other) for other in opinion.images[1:]):
        return replace(nearest, turned_by=_wrong_turn(opinion, view, box_px, shift_frac, halves=halves))
    fits = any(
        _matrix_fits(size_px[:: -1 if opinion.orientation >= 5 else 1], matrix_px, box_px, shift_frac, len(view))
        for size_px in opinion.sizes_px
    )
    verdict = Verdict.UNJUDGED if fits or not opinion.sizes_px else Verdict.WRONG_MATRIX
    return Judged(verdict) if nearest is None else Judged(verdict, nearest.mean_levels, nearest.max_levels)


def _wrong_turn(opinion: Opinion, view: Pixels, box_px: Array, shift_frac: Array, *, halves: bool) -> int | None:
    """Which other orientation explains the view."""
    for orientation in set(range(1, 9)) - {opinion.orientation}:
        for image in opinion.images:
            expected, inside = expected_view(image, orientation, box_px, shift_frac, len(view), halves=halves)
            if inside.any() and np.abs(view - expected)[inside].mean() <= MEAN_LEVELS:
                return orientation
    return None


def _alike(one: Pixels, other: Pixels) -> bool:
    if one.shape != other.shape:
        return False
    difference = np.abs(one.astype(np.int16) - other)
    return bool(difference.mean() <= MEAN_LEVELS and difference.max() <= MAX_LEVELS)


def turned(image: npt.NDArray[T], orientation: int) -> npt.NDArray[T]:
    """The image (H, W, C) as Exif's orientation 1 to 8 has it displayed."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return image[::rows, ::columns]


def _matrix_px(size_px: tuple[int, ...], box_px: Array, shift_frac: Array, side_px: int) -> Array:
    """The (2, 3) matrix from an upright image of this width and height to its view."""
    width, height = size_px
    x, y, side = map(float, box_px)
    if side <= 0:
        x, y, side = width / 2, height / 2, float(max(width, height))
    scale = side_px / side
    return np.array([
        [scale, 0, side_px * (0.5 + shift_frac[0]) - scale * x],
        [0, scale, side_px * (0.5 + shift_frac[1]) - scale * y],
    ])  # fmt: skip


def expected_view(
    stored: Pixels, orientation: int, box_px: Array, shift_frac: Array, side_px: int, *, halves: bool = False
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The view (S, S, 3), and its (S, S) pixels that are sampled wholly inside the image."""
    matrix_px = _matrix_px(turned(stored, orientation).shape[1::-1], box_px, shift_frac, side_px)
    known = np.concatenate([stored.astype(np.float64), np.ones((*stored.shape[:2], 1))], axis=-1)
    image, halvings = halve(known, matrix_px[0, 0], 0) if halves else (known, 0)
    block = 2**halvings
    padded = np.array(image.shape[1::-1]) * block - stored.shape[1::-1]  # columns and rows, behind the stored image
    if orientation >= 5:
        padded = padded[::-1]
    first = padded * [orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)]  # a turn may put them before it
    of_halved = np.column_stack([matrix_px[:, :2] * block, matrix_px[:, 2] - matrix_px[:, :2] @ first])
    view = warp(turned(image, orientation), of_halved, side_px, 0)
    return view[..., :3], view[..., 3] > 0.999


def _matrix_fits(size_px: tuple[int, ...], matrix_px: Array, box_px: Array, shift_frac: Array, side_px: int) -> bool:
    expected = _matrix_px(size_px, box_px, shift_frac, side_px)
    side = side_px / expected[0, 0]
    corners = np.array([[0, 0, 1], [side, side, 1]]).T
    return bool(np.abs((matrix_px - expected) @ corners).max() <= MATRIX_PX)


def _by_pillow(data: bytes) -> tuple[Pixels | None, tuple[int, int] | None]:
    size_px = None
    with warnings.catch_warnings(action="ignore"):
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
                size_px = image.size
                if image.mode.startswith("I"):  # 16 bits
                    grey = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
                    return np.repeat(grey[..., None], 3, axis=-1), size_px
                return np.asarray(image.convert("RGB")), size_px
        except Exception:  # whatever a decoder raises, it refuses
            return None, size_px


def _unmarked_cmyk(data: bytes) -> list[Pixels]:
    """The other reading of a JPEG of four inks without Adobe's segment: as the standard has it, not inverted."""
    with warnings.catch_warnings(action="ignore"), suppress(Exception):  # whatever a decoder raises, it refuses
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        if image.mode == "CMYK" and "adobe_transform" not in image.info:
            return [np.asarray(Image.fromarray(255 - np.asarray(image), "CMYK").convert("RGB"))]
    return []


def _by_opencv(data: bytes) -> tuple[Pixels | None, tuple[int, int] | None]:
    try:
        image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None, None
    if image is None:
        return None, None
    return np.ascontiguousarray(image[..., ::-1]), (image.shape[1], image.shape[0])


def _pixels_only(data: bytes) -> bytes:
    """A PNG or a WebP without metadata; other files as they are."""
    if data.startswith(PNG_START):
        critical = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
        return PNG_START + b"".join(
            data[start:end] for name, start, _, end in _chunks(data) if name in critical
        )  # fmt: skip
    if data.startswith(b"RIFF"):
        images = [data[start:end] for name, start, _, end in _chunks(data) if name in (b"VP8 ", b"VP8L")]
        if images:
            return b"RIFF" + struct.pack("<I", 4 + len(images[0])) + b"WEBP" + images[0]
    return data


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, bytes, int]]:
    """Name, first byte, body and last byte + 1 of each chunk of a PNG or a WebP."""
    png = data.startswith(PNG_START)
    at = 8 if png else 12
    name = b""
    while at + 8 <= len(data) and name != b"IEND":
        name = data[at + 4 : at + 8] if png else data[at : at + 4]
        (length,) = struct.unpack_from(">I" if png else "<4xI", data, at)
        end = at + 8 + length + (4 if png else length % 2)
        yield name, at, data[at + 8 : at + 8 + length], end
        at = end


def orientation_of(data: bytes) -> int:
    """Exif's orientation of a file, by the rule.

    A JPEG's first segment of Exif data counts, of a PNG or a WebP the chunk of that name; the first entry of the tag in
    the first directory, if it is one SHORT of 1 to 8. Whatever else there is: 1, upright.
    """
    return next((orientation_in(block) for block in _exif_blocks(data)), 1)


def orientation_in(block: bytes) -> int:
    """The orientation in a block of Exif data, from the byte-order mark on."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    try:
        if order is not None:
            (directory,) = struct.unpack_from(order + "I", block, 4)
            (count,) = struct.unpack_from(order + "H", block, directory)
            for place in range(count):
                tag, kind, many, value = struct.unpack_from(order + "HHIHxx", block, directory + 2 + 12 * place)
                if tag == ORIENTATION:
                    return value if kind == 3 and many == 1 and 1 <= value <= 8 else 1
    except struct.error:  # out of bounds
        pass
    return 1


def _exif_blocks(data: bytes) -> Iterator[bytes]:
    """From the byte-order mark on."""
    if data.startswith(b"\xff\xd8"):
        at = 2
        while at + 4 <= len(data) and data[at + 1] != 0xDA:
            if data[at + 1] == 0xFF:
                at += 1
                continue
            (length,) = struct.unpack_from(">H", data, at + 2)
            body = data[at + 4 : at + 2 + length]
            if data[at + 1] == 0xE1 and body.startswith(EXIF_START):
                yield body[len(EXIF_START) :]
            at += 2 + max(length, 2)
        return
    for name, _, body, _ in _chunks(data):
        if name == b"eXIf":
            yield body
        elif name == b"EXIF":
            yield body.removeprefix(EXIF_START)

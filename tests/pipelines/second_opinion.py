"""What a view of an image must show, by Pillow, OpenCV and the oracle: nothing of the product is used here.

The view is the box of the image as displayed, shifted, sampled bilinearly, with black outside the image. Where it is to
be halved first, each halving takes the mean of 2 x 2 pixels, of black beyond an odd border.
"""

import io
import struct
import warnings
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.pipelines.image_files import EXIF_START, ORIENTATION, PNG_START, put_together, take_apart
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


class Opinion(NamedTuple):
    """Images (H, W, 3), as stored, of the independent decoders that take a file; and how it must be shown."""

    images: list[Pixels]
    orientation: int


def opinion_of(data: bytes) -> Opinion:
    """Decode by Pillow and by OpenCV, and read the orientation.

    Where one of them refuses a PNG or a WebP for what is around its pixels, it gets the pixels alone.
    """
    images = [decode(data) or decode(_pixels_only(data)) for decode in (_by_pillow, _by_opencv)]
    return Opinion([image for some in images for image in some], orientation_of(data))


def judge(
    opinion: Opinion, view: Pixels, matrix_px: Array, box_px: Array, shift_frac: Array, *, halves: bool = False
) -> str:
    """Compare a view with what it must show, by any of the decoders: "same", "garbled" or "wrong_matrix".

    Args:
        opinion: of the file that it was made from.
        view: (S, S, 3).
        matrix_px: (2, 3) source-to-view matrix that came with it.
        box_px: (3,) centre x and y, side; side 0 is the square around the whole image.
        shift_frac: (2,) shift of the view in x and y, as a fraction of its side.
        halves: whether a view that minifies was made of a halved image.
    """
    found = "garbled"
    for image in opinion.images:
        pixels, inside = expected_view(image, opinion.orientation, box_px, shift_frac, len(view), halves=halves)
        difference = np.abs(view - pixels)
        if difference[inside].sum() <= MEAN_LEVELS * difference[inside].size and difference.max() <= MAX_LEVELS:
            expected = _matrix_px(turned(image, opinion.orientation).shape[1::-1], box_px, shift_frac, len(view))
            side = len(view) / expected[0, 0]
            if np.abs((matrix_px - expected) @ [[0, side], [0, side], [1, 1]]).max() <= MATRIX_PX:
                return "same"
            found = "wrong_matrix"
    return found


def turned(image: npt.NDArray[T], orientation: int) -> npt.NDArray[T]:
    """The image (H, W, C) as Exif's orientation 1 to 8 has it displayed."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    return image[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


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


def _by_pillow(data: bytes) -> list[Pixels]:
    """Of a JPEG of four inks without Adobe's segment, also the standard's reading, which is not inverted."""
    with warnings.catch_warnings(action="ignore"), suppress(Exception):  # whatever a decoder raises, it refuses
        image: Image.Image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
        if image.mode.startswith("I"):  # 16 bits
            return [np.repeat((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)[..., None], 3, axis=-1)]
        inks = image.mode == "CMYK" and "adobe_transform" not in image.info
        images = [image, *[Image.fromarray(255 - np.asarray(image), "CMYK")] * inks]
        return [np.asarray(one.convert("RGB")) for one in images]
    return []


def _by_opencv(data: bytes) -> list[Pixels]:
    with suppress(cv2.error):
        image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        return [] if image is None else [np.ascontiguousarray(image[..., ::-1])]
    return []


def _pixels_only(data: bytes) -> bytes:
    """A PNG or a WebP without metadata; other files as they are."""
    if not data.startswith((PNG_START, b"RIFF")):
        return data
    try:
        parts, _ = take_apart(data)
    except struct.error:  # out of bounds
        return data
    critical = (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"VP8 ", b"VP8L")
    kept = [part for part in parts if part.name in critical]
    return put_together(kept) if kept else data


def orientation_of(data: bytes) -> int:
    """Exif's orientation of a file whose structure is sound, by the rule.

    A JPEG's first segment of Exif data counts, of a PNG or a WebP the chunk of that name; the first entry of the tag in
    the first directory, if it is one SHORT of 1 to 8. Whatever else there is: 1, upright.
    """
    for part in take_apart(data)[0]:
        if part.name in (b"eXIf", b"EXIF") or (part.name == b"\xe1" and part.body.startswith(EXIF_START)):
            return orientation_in(part.body if part.name == b"eXIf" else part.body.removeprefix(EXIF_START))
    return 1


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

"""Orientation: read once, strictly, and part of the map from stored pixels to the view; no decoder turns anything."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.exif import read_orientation, stored_to_upright_px, upright_size_px
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.regions import LEAST_PIXELS
from tests.pipelines.decoder_fuzz import good_files, smooth_picture
from tests.pipelines.harness import RENDERERS, decode_chunk, make_views, plan_files, smooth_image
from tests.pipelines.image_parts import (
    EXIF_START,
    ORIENTATION,
    PNG_START,
    Entry,
    Part,
    exif_block,
    png_of,
    put_together,
    take_apart,
)
from tests.pipelines.mutations import dress
from tests.pipelines.second_opinion import opinion_of, orientation_in

RendererName = Literal["dali", "cpu"]
Kind = Literal["JPEG", "PNG", "WEBP"]
KINDS: tuple[Kind, ...] = ("JPEG", "PNG", "WEBP")
Pixels = npt.NDArray[np.uint8]
DESCRIPTION = 0x010E
SHORT, LONG = 3, 4
NO_COLOUR = ColourConfig(jitter="none")


def exif_of(*entries: Entry, order: str = ">", behind: int = 16, **damage: Any) -> bytes:
    """A block of Exif data with bytes behind it; `damage` as in `exif_block`."""
    return exif_block(list(entries), big=order == ">", after=bytes(behind), **damage)


def turning(value: int = 6, kind: int = SHORT, many: int = 1) -> tuple[int, int, int, int]:
    return ORIENTATION, kind, many, value


def orientation_of(block: bytes) -> int:
    return int(read_orientation(np.frombuffer(block, np.uint8)))


@pytest.mark.parametrize("order", ["<", ">"])
def test_every_orientation_is_read(order: str) -> None:
    described = (DESCRIPTION, 2, 20, 2**30)
    for value in range(1, 9):
        assert orientation_of(exif_of(turning(value), order=order)) == value
        assert orientation_of(exif_of(described, turning(value), order=order)) == value
        assert orientation_of(exif_of(turning(value), order=order, count=9)) == value, "damage behind the entry"
    assert orientation_of(exif_of(turning(6), turning(3), order=order)) == 6


BLOCKS = st.builds(
    lambda entries, order, count, directory, cut: exif_of(
        *entries, order=order, count=count, directory=directory
    )[: -cut or None],
    st.lists(
        st.tuples(
            st.sampled_from((ORIENTATION, ORIENTATION, DESCRIPTION)), st.sampled_from((SHORT, SHORT, 2, LONG)),
            st.sampled_from((0, 1, 1, 2**31)), st.sampled_from((0, 1, 5, 6, 8, 9, 2**31)),
        ),
        max_size=3,
    ),
    st.sampled_from("<>"),
    st.sampled_from((None, None, 0, 1, 2, 9, 0xFFFF)),
    st.sampled_from((8, 8, 8, 0, 60, 2**31, 2**32 - 1)),
    st.sampled_from((0, 0, 1, 3, 9, 16, 20, 28, 40)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(BLOCKS | st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: b"MM\0*\0\0\0\x08" + data))
@example(exif_of(turning(8), order="<"))
def test_damaged_blocks_are_read_by_the_rule(block: bytes) -> None:
    assert orientation_of(block) == orientation_in(block)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_map_to_the_upright_image_equals_pillows(orientation: int) -> None:
    height, width = 5, 7
    rows, columns = np.indices((height, width))
    stored = np.stack([columns, rows, np.zeros_like(rows)], axis=-1).astype(np.uint8)  # each pixel holds its place
    file = Image.fromarray(stored)
    file.getexif()[ORIENTATION] = orientation
    upright = np.asarray(ImageOps.exif_transpose(file))
    size, orientations = np.array([[height, width]]), np.array([orientation])
    assert upright_size_px(size, orientations).tolist() == [list(upright.shape[:2])]
    matrix = stored_to_upright_px(size, orientations)[0]
    for y, x in np.ndindex(upright.shape[:2]):
        stored_x, stored_y, _ = upright[y, x].astype(float)
        np.testing.assert_array_equal(matrix @ [stored_x + 0.5, stored_y + 0.5, 1], [x + 0.5, y + 0.5])


def encoded(image: Pixels, kind: Kind, exif: bytes | None) -> Pixels:
    every: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 97, "subsampling": 0},
        "PNG": {"compress_level": 1},
        "WEBP": {"lossless": True, "method": 0, "quality": 0},
    }
    options = every.get(kind, {})
    file = io.BytesIO()
    prefix = b"Exif\0\0" if kind == "JPEG" else b""
    Image.fromarray(image).save(file, kind, **options, **({} if exif is None else {"exif": prefix + exif}))
    return np.frombuffer(file.getvalue(), np.uint8)


def stored_as(upright: Pixels, orientation: int) -> Pixels:
    """The stored image that is to be turned into `upright`."""
    turn_back = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}[orientation]
    file = Image.fromarray(upright)
    file.getexif()[ORIENTATION] = turn_back
    return np.asarray(ImageOps.exif_transpose(file))


@functools.cache
def turned_and_upright_files(kind: Kind) -> tuple[list[Pixels], list[Pixels]]:
    """Portrait and landscape in all eight orientations, and as often upright."""
    rng = np.random.default_rng(0)
    uprights = [smooth_image(rng, 512, 640), smooth_image(rng, 640, 512)]
    turned = [
        encoded(stored_as(image, turn), kind, exif_of(turning(turn))) for turn in range(1, 9) for image in uprights
    ]
    return turned, [encoded(image, kind, None) for image in uprights] * 8


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regions", [False, True])
def test_rotated_files_give_the_views_and_matrices_of_upright_files(
    renderer: RendererName, kind: Kind, regions: bool
) -> None:
    """With boxes, mirrored samples and halving; portrait and landscape, decoded whole and in regions."""
    geometry = GeometryConfig(side_px=64)
    files, plain = turned_and_upright_files(kind)
    count = len(files)
    box_px = np.tile(np.array([[250, 280, 180], [270, 330, 120]], np.float32), (8, 1))
    draws = [
        draw_view(Augmentation(geometry, NO_COLOUR), seed=0, epoch=0, view=view, places=np.arange(count))
        for view in (0, 1)
    ]
    mirror = np.arange(count) % 3 == 0
    if regions:
        shape_px = plan_files(files, box_px, draws, geometry, mirror, regions=True).plan.shape_px
        assert (shape_px.prod(axis=1) < 512 * 640).all() == (kind == "JPEG")

    def views_of(data: list[Pixels]) -> Any:
        return make_views(
            renderer, data, box_px, draws, geometry, NO_COLOUR, mirror=mirror, encode=lambda file: file, regions=regions
        )

    for turned, upright in zip(views_of(files), views_of(plain), strict=True):
        np.testing.assert_array_equal(turned.matrix, upright.matrix)
        np.testing.assert_array_equal(turned.source_to_view_px, upright.source_to_view_px)
        difference = (turned.image.int() - upright.image.int()).abs()
        limit, mean = {"JPEG": (12, 0.7), "PNG": (1, 0.05), "WEBP": (1, 0.05)}[kind]  # JPEG's blocks are turned too
        assert difference.max() <= limit
        assert difference.float().mean() < mean


SMALL_PX, LARGE_PX = ((57, 39), (39, 57), (2, 2)), ((613, 457), (481, 720), (601, 601))
"""Widths and heights; of the second, regions are decoded."""


def with_orientation(data: bytes, orientation: int) -> bytes:
    """A file with Exif data before all others that it has."""
    block = exif_of(turning(orientation))
    if data.startswith(b"\xff\xd8"):
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 8) + EXIF_START + block + data[2:]
    if data.startswith(PNG_START):
        chunk = b"eXIf" + block
        return data[:33] + struct.pack(">I", len(block)) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    parts = [part for part in take_apart(data[:end])[0] if part.name != b"EXIF"]
    height, width = check_image(data).size_px
    dress("webp", parts, block, b"", (width, height), behind=False)
    return put_together("webp", parts) + data[end:]


@functools.cache
def files_of_every_kind(size_px: tuple[int, int]) -> dict[str, bytes]:
    return good_files(smooth_picture(*size_px))


@pytest.mark.parametrize("name", good_files())
def test_the_header_of_every_kind_has_the_size_of_the_decoded_image(name: str) -> None:
    """Whole images and regions, in all eight orientations, against Pillow."""
    sizes = (*SMALL_PX, *LARGE_PX) if name.startswith("jpeg") else SMALL_PX
    plain = [files_of_every_kind(size_px)[name] for size_px in sizes]
    files = [np.frombuffer(with_orientation(data, turn), np.uint8) for data in plain for turn in range(1, 9)]
    expected = [image for data in plain for image in [opinion_of(data).images[0].astype(np.int16)] * 8]
    for image, file, turn in zip(expected, files, [*range(1, 9)] * len(sizes), strict=True):
        header = check_image(file)
        assert (header.size_px, header.orientation) == (image.shape[:2], turn)
    geometry = GeometryConfig(side_px=16)
    draws = [draw_view(Augmentation(geometry, NO_COLOUR), seed=0, epoch=0, view=0, places=np.arange(len(files)))]
    box_px = np.tile(np.array([[200, 200, 60]], np.float32), (len(files), 1))
    for regions in (False, True):
        chunk = plan_files(files, box_px, draws, geometry, regions=regions)
        decoded, plan = decode_chunk(chunk, regions=regions), chunk.plan
        for row, image in enumerate(expected):
            (top, left), (height, width) = plan.start_px[row], plan.shape_px[row]
            large = name.startswith("jpeg") and image.shape[0] * image.shape[1] >= LEAST_PIXELS
            assert ((height, width) != image.shape[:2]) == (regions and large)
            difference = np.abs(decoded.at(row) - image[top : top + height, left : left + width])
            assert difference.max() <= 2


def png(image: Pixels, before: Sequence[bytes], after: Sequence[bytes] = ()) -> Pixels:
    """A PNG with blocks of Exif data before and after its pixels."""
    header, data, end = png_of(image, 8, 2, interlace=False)
    blocks, blocks_after = ([Part(b"eXIf", block) for block in some] for some in (before, after))
    return np.frombuffer(put_together("png", [header, *blocks, data, *blocks_after, end]), np.uint8)


def webp(image: Pixels, *behind: tuple[bytes, bytes], flags: int = 8) -> Pixels:
    """An extended WebP with chunks behind its image."""
    parts, _ = take_apart(encoded(image, "WEBP", None).tobytes())
    size = b"".join(struct.pack("<I", side - 1)[:3] for side in image.shape[1::-1])
    parts = [Part(b"VP8X", bytes([flags, 0, 0, 0]) + size), *parts, *(Part(*chunk) for chunk in behind)]
    return np.frombuffer(put_together("webp", parts), np.uint8)


IMAGE = smooth_image(np.random.default_rng(2), 75, 56, sigma_px=2)
EXIF = (b"EXIF", exif_of(turning()))


@pytest.mark.parametrize(
    ("file", "orientation"),
    [
        (png(IMAGE, [exif_of(turning(), mark=b"IM\0*", order="<")]), 1),
        (png(IMAGE, [exif_of(turning(), mark=b"M\x08\0*")]), 1),
        (png(IMAGE, [exif_of(turning(1)), exif_of(turning(6))]), 1),
        (png(IMAGE, [exif_of(turning(6)), exif_of(turning(1))]), 6),
        (png(IMAGE, [], [exif_of(turning(6))]), 6),
        (png(IMAGE, [exif_of(turning(), count=9, behind=4)]), 6),
        (png(IMAGE, [exif_of(turning(), (DESCRIPTION, 2, 20, 2**30))]), 6),
        (png(IMAGE, [b""]), 1),
        (webp(IMAGE), 1),
        (webp(IMAGE, (b"XMP ", b"abc"), EXIF, flags=12), 6),
        (webp(IMAGE, (b"EXIF", b"Exif\0\0" + EXIF[1])), 6),
        (webp(IMAGE, (b"ICCP", b"odd"), flags=0x20), 1),
        (webp(IMAGE, EXIF, (b"EXIF", exif_of(turning(3)))), 6),
    ],
)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_odd_metadata_never_reaches_the_decoder(renderer: RendererName, file: Pixels, orientation: int) -> None:
    """Files that readers behind the decoder turn differently, or fail on, give the pixels that the rule says."""
    assert check_image(file).orientation == orientation
    upright = Image.fromarray(IMAGE)
    upright.getexif()[ORIENTATION] = orientation
    plain = encoded(np.asarray(ImageOps.exif_transpose(upright)), "PNG", None)
    geometry = GeometryConfig(side_px=32)
    draws = draw_view(Augmentation(geometry, NO_COLOUR), seed=0, epoch=0, view=0, places=np.arange(2))
    box_px = np.array([[28, 30, 30], [28, 30, 30]], np.float32)
    (view,) = make_views(
        renderer, [file, plain], box_px, [draws[[0, 0]]], geometry, NO_COLOUR, encode=lambda data: data
    )
    assert (view.image[0].int() - view.image[1].int()).abs().max() <= 1


@pytest.mark.parametrize("mark", [b"IM\0*", b"M\x08\0*"])
@pytest.mark.parametrize("renderer", RENDERERS)
def test_marks_that_ended_the_process(renderer: RendererName, mark: bytes) -> None:
    """A decoder that turned by them wrote over the memory of the images beside: the process ended, or others broke."""
    rng = np.random.default_rng(3)
    beside = [encoded(smooth_image(rng, 900, 700), "JPEG", None) for _ in range(6)]
    portrait = smooth_image(rng, 1200, 900)
    geometry = GeometryConfig(side_px=64)
    draws = draw_view(Augmentation(geometry, NO_COLOUR), seed=0, epoch=0, view=0, places=np.arange(7))
    box_px = np.tile(np.array([[350, 450, 500]], np.float32), (7, 1))

    def views_of(file: Pixels) -> Any:
        (view,) = make_views(renderer, [*beside, file], box_px, [draws], geometry, NO_COLOUR, encode=lambda data: data)
        return view.image

    marked = png(portrait, [exif_of(turning(), mark=mark)])  # big-endian for readers that look at one byte
    np.testing.assert_array_equal(views_of(marked), views_of(encoded(portrait, "PNG", None)))

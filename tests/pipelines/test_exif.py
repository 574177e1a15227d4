"""Orientation: read once, strictly, and part of the map from stored pixels to the view; no decoder turns anything."""

import functools
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import read_orientation, stored_to_upright_px, upright_size_px
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from peclr_dali.pipelines.views.plan import LEAST_PIXELS
from tests.pipelines.harness import (
    NO_COLOUR,
    RENDERERS,
    RendererName,
    assert_equal_views,
    decode_chunk,
    draws_of,
    make_views,
    plan_files,
    smooth_image,
)
from tests.pipelines.image_files import ORIENTATION, encoded, exif_block, good_files, take_apart, with_exif
from tests.pipelines.mutations import wild_exif
from tests.pipelines.second_opinion import opinion_of, orientation_in, orientation_of

KINDS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 97, "subsampling": 0}, "PNG": {"compress_level": 1}, "WEBP": {"lossless": True, "method": 0},
}  # fmt: skip


def block_of(orientation: int, *, big: bool = True) -> bytes:
    return exif_block((0x010E, 2, 20, 2**30), (ORIENTATION, 3, 1, orientation), big=big)


def test_blocks_are_read_by_the_rule() -> None:
    for orientation in range(1, 9):
        for big in (False, True):
            assert read_orientation(np.frombuffer(block_of(orientation, big=big), np.uint8)) == orientation
    rng, turned = np.random.default_rng(0), 0
    for _ in range(5000):
        block = wild_exif(rng) if rng.random() < 0.8 else b"MM\0*\0\0\0\x08" + rng.bytes(int(rng.integers(60)))
        assert read_orientation(np.frombuffer(block, np.uint8)) == orientation_in(block), block
        turned += orientation_in(block) > 1
    assert turned > 500


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


@functools.cache
def turned_and_upright_files(kind: str) -> tuple[list[bytes], list[bytes]]:
    """Portrait and landscape in all eight orientations, and as often upright."""
    rng = np.random.default_rng(0)
    uprights = [Image.fromarray(smooth_image(rng, *size)) for size in ((512, 640), (640, 512))]
    turned = []
    for orientation in range(1, 9):
        for upright in uprights:
            upright.getexif()[ORIENTATION] = {6: 8, 8: 6}.get(orientation, orientation)  # turns it back
            stored = ImageOps.exif_transpose(upright)
            stored.getexif().clear()
            turned.append(with_exif(encoded(stored, kind, **KINDS[kind]), block_of(orientation), stored.size))
    plain = [encoded(Image.fromarray(np.asarray(image)), kind, **KINDS[kind]) for image in uprights]
    return turned, plain * 8


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regions", [False, True])
def test_rotated_files_give_the_views_and_matrices_of_upright_files(
    renderer: RendererName, kind: str, regions: bool
) -> None:
    """With boxes, mirrored samples and halving; portrait and landscape, decoded whole and in regions."""
    geometry = GeometryConfig(side_px=64)
    turned, plain = ([np.frombuffer(data, np.uint8) for data in files] for files in turned_and_upright_files(kind))
    box_px = np.tile(np.array([[250, 280, 180], [270, 330, 120]], np.float32), (8, 1))
    draws = [draws_of(Augmentation(geometry, NO_COLOUR), len(turned), view=view, seed=0) for view in (0, 1)]
    mirror = np.arange(len(turned)) % 3 == 0
    if regions:
        shape_px = plan_files(turned, box_px, draws, geometry, mirror, regions=True).plan.shape_px
        assert (shape_px.prod(axis=1) < 512 * 640).all() == (kind == "JPEG")
    ours, theirs = (
        make_views(
            renderer, files, box_px, draws, geometry, NO_COLOUR, mirror=mirror, encode=lambda file: file,
            regions=regions,
        )
        for files in (turned, plain)
    )  # fmt: skip
    within, mean = {"JPEG": (12, 0.7)}.get(kind, (1, 0.05))  # JPEG's blocks are turned too
    assert_equal_views(ours, theirs, within=within, mean=mean)


@pytest.mark.parametrize("name", good_files())
def test_the_header_of_every_kind_has_the_size_of_the_decoded_image(name: str) -> None:
    """Whole images and regions, in all eight orientations, against Pillow."""
    sizes = [(57, 39), (39, 57), (2, 2), *[(613, 457), (481, 720), (601, 601)] * name.startswith("jpeg")]
    files, expected = [], []
    for size_px in sizes:
        data = good_files(size_px)[name]
        files += [with_exif(data, block_of(turn), size_px) for turn in range(1, 9)]
        expected += [opinion_of(data).images[0].astype(np.int16)] * 8
    for image, file, turn in zip(expected, files, [*range(1, 9)] * len(sizes), strict=True):
        header = check_image(file)
        assert (header.size_px, header.orientation) == (image.shape[:2], turn)
    geometry = GeometryConfig(side_px=16)
    draws = [draws_of(Augmentation(geometry, NO_COLOUR), len(files), seed=0)]
    box_px = np.tile(np.array([[200, 200, 60]], np.float32), (len(files), 1))
    for regions in (False, True):
        chunk = plan_files(files, box_px, draws, geometry, regions=regions)
        decoded, plan = decode_chunk(chunk, regions=regions), chunk.plan
        for row, image in enumerate(expected):
            (top, left), (height, width) = plan.start_px[row], plan.shape_px[row]
            large = name.startswith("jpeg") and image.shape[0] * image.shape[1] >= LEAST_PIXELS
            assert ((height, width) != image.shape[:2]) == (regions and large)
            assert np.abs(decoded.at(row) - image[top : top + height, left : left + width]).max() <= 2


@pytest.mark.parametrize("name", ["png", "png exif, text", "webp", "webp exif"])
def test_metadata_never_reaches_the_decoder(name: str) -> None:
    """Decoders that turn by damaged Exif data have written beyond their images."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        data = with_exif(good_files()[name], wild_exif(rng), (72, 56))
        file = check_image(data)
        assert file.orientation == orientation_of(data)
        parts, _ = take_apart(file.encoded.tobytes())
        assert {part.name for part in parts} <= {b"IHDR", b"IDAT", b"IEND", b"VP8X", b"VP8 "}
        assert not any(part.body[0] for part in parts if part.name == b"VP8X")

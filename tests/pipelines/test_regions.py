"""Decoding only what the views reach: the same pixels, on both backends."""

from __future__ import annotations

import dataclasses
import io
import struct
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PillowImage

from pipelines.batch import Batch, View
from pipelines.config import PipelinesConfig
from pipelines.draws import ColourConfig, Draw, FloatArray, GeometryConfig, draw_view
from pipelines.loader import Loader
from pipelines.matrices import compose
from pipelines.order import EpochOrder, RankSlice
from pipelines.regions import Regions, find_regions, jpeg_size_px
from pipelines.sources.folder import load_folder
from tests.pipelines.harness import BACKENDS, make_views, smooth_image

Backend = Literal["dali", "opencv"]
Encoded = np.ndarray
NO_COLOUR = ColourConfig(jitter="none")


def jpeg(
    image: np.ndarray, *, progressive: bool = False, sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420
) -> Encoded:
    flags = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive),
             cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]  # fmt: skip
    return np.asarray(cv2.imencode(".jpg", image[..., ::-1], flags)[1]).ravel()


def tables(geometry: GeometryConfig, count: int, seed: int = 1) -> list[FloatArray]:
    positions = np.arange(count)
    return [draw_view(geometry, NO_COLOUR, seed=seed, epoch=0, view=view, positions=positions) for view in (0, 1)]


SUBSAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [0, "edge"])
def test_views_of_regions_are_views_of_whole_images(backend: Backend, fill: Literal[0, "edge"]) -> None:
    """Large and odd sizes, boxes inside, at the border and beyond it, halved up to four times, mirrored or not."""
    rng = np.random.default_rng(0)
    geometry = GeometryConfig(side_px=64, fill=fill)
    sizes = [(720, 1280)] * 8 + [(721, 1283)] * 8 + [(1500, 401)] * 4 + [(300, 300)] * 4
    encoded = [
        jpeg(smooth_image(rng, *size, sigma_px=1.5), sampling=SUBSAMPLINGS[row % 4], progressive=row % 5 == 4)
        for row, size in enumerate(sizes)
    ]
    boxes = [
        [rng.uniform(-50, width + 50), rng.uniform(-50, height + 50), rng.uniform(60, 300)] for height, width in sizes
    ]
    boxes[7], boxes[15], boxes[16] = [0, 0, 0], [700, 360, 1200], [-900, 2000, 200]
    box_px, draws = np.array(boxes, np.float32), tables(geometry, len(sizes))
    mirror = np.arange(len(sizes)) % 3 == 0
    regions = find_regions(encoded, box_px, draws, geometry, mirror)
    assert regions is not None
    assert 15 <= regions.partial.sum() < len(sizes)
    decoded = regions.shape_px.prod(axis=1)[regions.partial] / regions.size_px.prod(axis=1)[regions.partial]
    assert decoded.mean() < 0.4

    halvings = [compose(box_px, np.array(sizes), table, geometry, mirror).halvings for table in draws]
    assert {0, 1, 2, 3} <= set(np.concatenate(halvings)[np.tile(regions.partial, 2)].tolist())

    def views_of(parts: Regions | None) -> list[View]:
        return make_views(
            backend, encoded, box_px, draws, geometry, NO_COLOUR, mirror=mirror, encode=lambda data: data, regions=parts
        )

    whole, spared = views_of(None), views_of(regions)
    for one, other in zip(whole, spared, strict=True):
        np.testing.assert_array_equal(one.matrix, other.matrix)
        np.testing.assert_array_equal(one.source_to_view_px, other.source_to_view_px)
        difference = (one.image.int() - other.image.int()).abs()
        # The warp's matrix is rounded to float32 about another origin, which may turn a level over.
        assert difference.max() <= 1
        assert difference.float().mean() < 0.03


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loader_decodes_regions_by_itself(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes of them what it makes of whole images, in an order of its own."""
    rng, count = np.random.default_rng(0), 12
    for number in range(count):
        (tmp_path / f"{number:02}.jpg").write_bytes(jpeg(smooth_image(rng, 600, 800, sigma_px=1.5)).tobytes())
    box_px = np.stack([rng.uniform(150, 650, count), rng.uniform(150, 450, count), rng.uniform(80, 150, count)], axis=1)
    index = dataclasses.replace(load_folder(tmp_path), box_px=box_px.astype(np.float32))
    shares: list[float] = []

    def counted(*arguments: Any) -> Regions | None:
        found = find_regions(*arguments)
        shares.append(0.0 if found is None else float(found.partial.mean()))
        return found

    monkeypatch.setattr("pipelines.feed.find_regions", counted)

    def batches(decode: Literal["auto", "whole"]) -> list[Batch]:
        shares.clear()
        with Loader(
            index, EpochOrder(count, count, seed=0), RankSlice(6, 0, 6),
            PipelinesConfig(backend=backend, batch=3, decode=decode), GeometryConfig(side_px=64), NO_COLOUR,
            seed=0, device=torch.device("cpu"), last_step=4,
        ) as loader:  # fmt: skip
            return list(loader)

    whole = batches("whole")
    assert shares == []
    spared = batches("auto")
    assert min(shares) > 0.9
    for one, other in zip(whole, spared, strict=True):
        assert torch.equal(one.samples, other.samples)
        for ours, theirs in zip(one.views, other.views, strict=True):
            assert torch.equal(ours.matrix, theirs.matrix)
            assert torch.equal(ours.source_to_view_px, theirs.source_to_view_px)
            assert (ours.image.int() - theirs.image.int()).abs().max() <= 1


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(400, 1600), st.integers(400, 1600)),
    st.tuples(st.floats(-0.3, 1.3), st.floats(-0.3, 1.3), st.floats(0.02, 2)),
    st.integers(0, 2**32), st.booleans(), st.sampled_from([16, 64, 200]),
)  # fmt: skip
def test_a_region_holds_every_pixel_that_is_sampled(
    size: tuple[int, int], box: tuple[float, float, float], seed: int, mirrored: bool, side_px: int
) -> None:
    """The four pixels around every sample, in the pixels of the halved source, lie inside, whole blocks of them."""
    geometry = GeometryConfig(side_px=side_px)
    height, width = size
    box_px = np.array([[box[0] * width, box[1] * height, box[2] * max(size)]], np.float32)
    draws, mirror = tables(geometry, 1, seed), np.array([mirrored])
    data = header(height, width)
    regions = find_regions([data], box_px, draws, geometry, mirror)
    if regions is None:
        return
    (start,), (shape,) = regions.start_px, regions.shape_px
    stop = start + shape
    assert (start >= 0).all()
    assert (stop <= size).all()
    assert (shape > 0).all()
    assert shape.prod() < 0.8 * height * width
    for table in draws:
        view = compose(box_px, np.array([size]), table, geometry, mirror)
        block = 2 ** int(view.halvings[0])
        assert (start % block == 0).all()
        assert ((stop % block == 0) | (stop == size)).all()
        centers = np.arange(side_px) + 0.5
        grid = np.stack([*np.meshgrid(centers, centers), np.ones((side_px, side_px))], axis=-1)
        inverse = np.linalg.inv(np.vstack([view.minified_to_view_px[0], [0, 0, 1]]))[:2]
        sampled = np.floor(grid @ inverse.T - 0.5)[..., ::-1]  # row and column of the upper left of four pixels
        inside = np.clip([sampled, sampled + 1], 0, np.array(size) // block - 1)  # beyond the image nothing is read
        assert (inside * block >= start).all()
        assert ((inside + 1) * block <= stop).all()


def header(height: int, width: int, *segments: bytes) -> Encoded:
    """As much of a JPEG as is looked at, padded to a size that makes it worth a look."""
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + bytes(3)
    data = b"\xff\xd8" + b"".join(segments) + frame + b"\xff\xda" + bytes(64)
    return np.frombuffer(data, np.uint8)


def exif(orientation: int | None, order: Literal["<", ">"] = "<") -> bytes:
    entries = [(0x010F, 2, 1, 0)] + ([(0x0112, 3, 1, orientation)] if orientation is not None else [])
    tiff = (
        (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8) + struct.pack(order + "H", len(entries))
    )
    for tag, kind, count, value in entries:
        tiff += struct.pack(order + "HHIHH", tag, kind, count, value, 0)
    body = b"Exif\0\0" + tiff + bytes(4)
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def test_the_size_of_an_image_that_is_not_turned_is_known() -> None:
    assert jpeg_size_px(header(720, 1280)) == (720, 1280)
    assert jpeg_size_px(header(720, 1280, b"\xff\xe0\x00\x04ab", b"\xff\xff\xe2\x00\x02")) == (720, 1280)
    for order in ("<", ">"):
        assert jpeg_size_px(header(720, 1280, exif(1, order))) == (720, 1280)
        assert jpeg_size_px(header(720, 1280, exif(None, order))) == (720, 1280)
        assert jpeg_size_px(header(720, 1280, exif(6, order))) == (0, 0)
    assert jpeg_size_px(header(720, 1280, b"\xff\xe1\x00\x0ahttp://a")) == (720, 1280)
    assert jpeg_size_px(header(720, 1280, b"\xff\xe1\x00\x0aExif\0\0??")) == (0, 0)
    assert jpeg_size_px(header(720, 1280, exif(1)[:-14].replace(b"\x00\x32", b"\x00\x24"))) == (0, 0)
    assert jpeg_size_px(np.asarray(cv2.imencode(".png", np.zeros((9, 9, 3), np.uint8))[1]).ravel()) == (0, 0)


def test_pillow_s_exif_is_read_as_the_decoder_reads_it() -> None:
    for orientation in range(1, 9):
        mark = PillowImage.Exif()
        mark[0x0112] = orientation
        file = io.BytesIO()
        PillowImage.new("RGB", (300, 200)).save(file, "JPEG", exif=mark)
        data = np.frombuffer(file.getvalue(), np.uint8)
        assert jpeg_size_px(data) == ((200, 300) if orientation == 1 else (0, 0))


def test_small_files_and_images_that_are_all_seen_are_decoded_whole() -> None:
    geometry = GeometryConfig()
    draws = tables(geometry, 1)
    box_px = np.array([[640, 360, 100]], np.float32)
    assert find_regions([header(720, 1280)], box_px, draws, geometry) is not None
    assert find_regions([header(511, 512)], box_px * 0.3, draws, geometry) is None
    assert find_regions([header(720, 1280)], np.array([[0, 0, 0]], np.float32), wide(draws), geometry) is None
    assert find_regions([header(720, 1280, exif(6))], box_px, draws, geometry) is None


def wide(draws: list[FloatArray]) -> list[FloatArray]:
    copies = [table.copy() for table in draws]
    for table in copies:
        table[:, Draw.MAGNIFICATION] = 0.6
    return copies


@pytest.mark.parametrize("size", [(720, 1280), (333, 777), (1000, 4000), (65, 9973)])
def test_fractions_name_whole_pixels(size: tuple[int, int]) -> None:
    """Single precision carries a place in an image exactly: every start and shape comes back."""
    for axis, length in enumerate(size):
        pixels = np.arange(length + 1)
        array = np.zeros((length + 1, 2), np.int64)
        array[:, axis] = pixels
        start, shape = Regions(np.tile(size, (length + 1, 1)), array, array).fractions()
        np.testing.assert_array_equal(np.rint(start[:, axis] * np.float32(length)), pixels)
        np.testing.assert_array_equal(np.rint(shape[:, axis] * np.float32(length)), pixels)

"""Decoding only what the views reach: the same pixels, by both renderers."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from peclr_dali.pipelines.views.plan import Plan, plan_views
from tests.pipelines.harness import (
    NO_COLOUR,
    RENDERERS,
    RendererName,
    assert_equal,
    assert_equal_views,
    draws_of,
    index_of,
    jpeg,
    load,
    make_views,
    plan_files,
    smooth_image,
)


def tables(geometry: GeometryConfig, count: int, seed: int = 1) -> list[FloatArray]:
    return [draws_of(Augmentation(geometry, NO_COLOUR), count, view=view, seed=seed) for view in (0, 1)]


SUBSAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)  # fmt: skip


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("fill", [0, "edge"])
def test_views_of_regions_equal_views_of_whole_images(renderer: RendererName, fill: Literal[0, "edge"]) -> None:
    """Large and odd sizes, boxes inside, at the border and beyond it, halved up to four times, mirrored or not."""
    rng = np.random.default_rng(0)
    geometry = GeometryConfig(side_px=64, fill=fill)
    sizes = [(720, 1280)] * 8 + [(721, 1283)] * 8 + [(1500, 401)] * 4 + [(300, 300)] * 4
    encoded = []
    for row, size in enumerate(sizes):
        sampling = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SUBSAMPLINGS[row % 4])
        flags = (cv2.IMWRITE_JPEG_PROGRESSIVE, int(row % 5 == 4), *sampling)
        encoded.append(np.frombuffer(jpeg(smooth_image(rng, *size, sigma_px=1.5), *flags), np.uint8))
    boxes = [
        [rng.uniform(-50, width + 50), rng.uniform(-50, height + 50), rng.uniform(60, 300)] for height, width in sizes
    ]
    boxes[7], boxes[15], boxes[16] = [0, 0, 0], [700, 360, 1200], [-900, 2000, 200]
    box_px, draws = np.array(boxes, np.float32), tables(geometry, len(sizes))
    mirror = np.arange(len(sizes)) % 3 == 0
    plan = plan_files(encoded, box_px, draws, geometry, mirror, regions=True).plan
    partial = (plan.shape_px < sizes).any(axis=1)
    assert 15 <= partial.sum() < len(sizes)
    assert (plan.shape_px.prod(axis=1)[partial] / np.array(sizes).prod(axis=1)[partial]).mean() < 0.4
    assert {0, 1, 2, 3} <= set(plan.halvings[:, partial].ravel().tolist())

    def views_of(*, regions: bool) -> list[View]:
        return make_views(
            renderer, encoded, box_px, draws, geometry, NO_COLOUR, mirror=mirror, encode=lambda data: data,
            regions=regions,
        )  # fmt: skip

    # The warp's matrix is rounded to float32 about another origin, which may turn a level over.
    assert_equal_views(views_of(regions=True), views_of(regions=False), within=1, mean=0.03)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_loader_decodes_regions_by_itself(
    renderer: RendererName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes of them what it makes of whole images, in an order of its own."""
    rng, count = np.random.default_rng(0), 12
    for number in range(count):
        (tmp_path / f"{number:02}.jpg").write_bytes(jpeg(smooth_image(rng, 600, 800, sigma_px=1.5)))
    box_px = np.stack([rng.uniform(150, 650, count), rng.uniform(150, 450, count), rng.uniform(80, 150, count)], axis=1)
    index = dataclasses.replace(index_of(tmp_path), box_px=box_px.astype(np.float32))
    shares: list[float] = []

    def counted(size_px: Any, *arguments: Any, **options: Any) -> Plan:
        plan = plan_views(size_px, *arguments, **options)
        shares.append(float((plan.shape_px < size_px).any(axis=1).mean()))
        return plan

    monkeypatch.setattr("peclr_dali.pipelines.loader.prepare.plan_views", counted)

    def batches(decode: Literal["auto", "whole"]) -> list[Batch]:
        shares.clear()
        augmentations = [Augmentation(GeometryConfig(side_px=side_px), NO_COLOUR) for side_px in (40, 64, 40)]
        return load(index, augmentations, batch=6, last=4, chunk=3, views=renderer, decode=decode)

    whole = batches("whole")
    assert max(shares) == 0
    regions = batches("auto")
    assert min(shares) > 0.9
    assert_equal(regions, whole, within=1)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(400, 1600), st.integers(400, 1600)),
    st.tuples(st.floats(-0.3, 1.3), st.floats(-0.3, 1.3), st.floats(0.02, 2)),
    st.integers(0, 2**32), st.booleans(), st.sampled_from([16, 64, 200]), st.integers(1, 8),
)  # fmt: skip
def test_a_region_holds_every_pixel_that_is_sampled(
    size: tuple[int, int], box: tuple[float, float, float], seed: int, mirrored: bool, side_px: int, orientation: int
) -> None:
    """The four pixels around every sample, in the pixels of the halved source, lie inside, whole blocks of them."""
    geometry = GeometryConfig(side_px=side_px)
    height, width = size
    box_px = np.array([[box[0] * width, box[1] * height, box[2] * max(size)]], np.float32)
    draws, mirror = tables(geometry, 1, seed), np.array([mirrored])
    plan, whole = (
        plan_views(
            np.array([size]), np.array([orientation]), box_px, draws, [geometry] * 2, mirror=mirror,
            croppable=np.array([croppable]),
        )
        for croppable in (True, False)
    )  # fmt: skip
    (start,), (shape,) = plan.start_px, plan.shape_px
    stop = start + shape
    assert (start >= 0).all()
    assert (stop <= size).all()
    assert (shape > 0).all()
    assert whole.start_px.tolist() == [[0, 0]]
    assert whole.shape_px.tolist() == [[height, width]]
    if tuple(shape) == size:
        return
    assert shape.prod() < 0.8 * height * width
    for halvings, decoded_to_view_px in zip(whole.halvings[:, 0], whole.decoded_to_view_px[:, 0], strict=True):
        block = 2 ** int(halvings)
        assert (start % block == 0).all()
        assert ((stop % block == 0) | (stop == size)).all()
        centers = np.arange(side_px) + 0.5
        grid = np.stack([*np.meshgrid(centers, centers), np.ones((side_px, side_px))], axis=-1)
        inverse = np.linalg.inv(np.vstack([decoded_to_view_px, [0, 0, 1]]))[:2]
        sampled = np.floor(grid @ inverse.T - 0.5)[..., ::-1]  # row and column of the upper left of four pixels
        inside = np.clip([sampled, sampled + 1], 0, np.array(size) // block - 1)  # beyond the image nothing is read
        assert (inside * block >= start).all()
        assert ((inside + 1) * block <= stop).all()

"""All ways to make views against the float64 oracle, and the emitted matrices against where dots really land."""

import math
from collections.abc import Sequence
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import BoolArray, FloatArray
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.render.cpu_views import view_to_source
from peclr_dali.pipelines.views.appearance import Range
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.draws import COLUMNS
from peclr_dali.pipelines.views.plan import count_halvings
from tests.conftest import Record
from tests.pipelines import reference
from tests.pipelines.harness import NO_COLOUR, RENDERERS, Image, RendererName, draws_of, make_views, smooth_image

PLAIN_DRAW = np.zeros(COLUMNS, np.float32)
PLAIN_DRAW[[Draw.MAGNIFICATION, Draw.HUE, Draw.SATURATION, Draw.VALUE_SCALE]] = 1
CENTER_BOX = np.array([112, 112, 168], np.float32)


def far_from_fill(matrix_px: FloatArray, size_px: tuple[int, int], side_px: int) -> np.ndarray:
    """Mask (side, side) of view pixels that show the source from two pixels inside its border."""
    inside = np.zeros(size_px, np.uint8)
    inside[3:-3, 3:-3] = 1
    return reference.warp(inside[..., None].astype(float), matrix_px.astype(float), side_px, fill=0)[..., 0] > 0.999


def near_hue_cut(image: np.ndarray, margin: float = 2.0) -> np.ndarray:
    """Mask of reds whose hue is so near to 0 or 360 degrees that rounding decides the side.

    Scaling a hue tears red apart there: 359 degrees becomes half a turn at a factor of one half, 1 degree stays red.
    """
    red, green, blue = np.moveaxis(image.astype(float), -1, 0)
    return np.asarray((red >= np.maximum(green, blue) - margin) & (np.abs(green - blue) <= margin))


def differences_from_oracle(
    view: View,
    images: Sequence[Image],
    boxes: FloatArray,
    draws: FloatArray,
    augmentation: Augmentation,
    mirror: BoolArray | None = None,
    *,
    border: bool = False,
    margin: float = 2.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Absolute differences of pixels that are far from the fill, and which of them are near the hue's cut.

    The matrices are compared too. `border`: all pixels, since there is no jump at the image's border.
    """
    geometry, colour, found, near = augmentation.geometry, augmentation.colour, [], []
    for row, image in enumerate(images):
        box_px, draw, mirrored = boxes[row], draws[row], mirror is not None and bool(mirror[row])
        matrices = reference.view_matrices(box_px, image.shape[:2], draw, geometry.side_px, mirror=mirrored)
        np.testing.assert_allclose(view.matrix[row], matrices[0], atol=1e-6)
        np.testing.assert_allclose(view.source_to_view_px[row], matrices[1], atol=2e-4)
        plain, expected = (
            reference.make_view(image, box_px, draw, geometry, how, augmentation.appearance, mirror=mirrored)
            for how in (NO_COLOUR, colour)
        )
        checked = far_from_fill(view.source_to_view_px[row].numpy(), image.shape[:2], geometry.side_px) | border
        if draw[Draw.SOBEL] or draw[Draw.BLUR]:  # which carry the border's jump inside
            checked = cv2.erode(checked.astype(np.uint8), np.ones((15, 15))) > 0
        found.append(np.abs(expected.astype(float) - view.image[row].permute(1, 2, 0).cpu().numpy())[checked])
        near.append((near_hue_cut(plain, margin) & (colour.jitter == "hsv"))[checked])
    return np.concatenate(found), np.concatenate(near)


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("jitter", ["none", "hsv"])
@pytest.mark.parametrize("fill", [0, 77, "edge"])
def test_pixels_agree_with_the_oracle(
    renderer: RendererName, jitter: Literal["none", "hsv"], fill: int | Literal["edge"]
) -> None:
    rng = np.random.default_rng(0)
    geometry = GeometryConfig(fill=fill, crop_probability=0.5, flip_probability=0.5)
    colour = ColourConfig(jitter=jitter)
    sizes = [(224, 224)] * 9 + [(180, 320), (300, 200), (61, 45), (40, 1500), (23, 900)]
    images = [smooth_image(rng, *size) for size in sizes]
    boxes = np.array([CENTER_BOX] * 9 + [[160, 90, 120], [90, 160, 290]] + [[0, 0, 0]] * 3, np.float32)
    draws = draws_of(Augmentation(geometry, colour), len(images))
    mirror = np.arange(len(images)) % 3 == 1
    (view,) = make_views(renderer, images, boxes, [draws], geometry, colour, mirror=mirror)

    differences, near = differences_from_oracle(
        view, images, boxes, draws, Augmentation(geometry, colour), mirror, border=fill == "edge"
    )
    differences = differences[~near]
    assert len(differences) > 100_000
    assert near.sum() < 0.15 * len(differences)
    assert differences.mean() <= 1.0
    assert np.percentile(differences, 99.9) <= 6


@pytest.mark.parametrize("renderer", RENDERERS)
def test_rounding_shows_only_where_the_hue_wraps_around(renderer: RendererName) -> None:
    """Flat colours in every direction, without a warp: the jitter itself is exact to a level."""
    geometry, colour = GeometryConfig(side_px=32), ColourConfig()
    grid = np.stack(np.meshgrid(*[np.linspace(0, 255, 16)] * 3), axis=-1).reshape(64, 64, 3).astype(np.uint8)
    images = [grid[y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
    draws = draws_of(Augmentation(geometry, colour), len(images))
    draws[:, : Draw.MAGNIFICATION + 1] = PLAIN_DRAW[: Draw.MAGNIFICATION + 1]
    boxes = np.zeros((len(images), 3), np.float32)
    (view,) = make_views(renderer, images, boxes, [draws], geometry, colour)
    for row, image in enumerate(images):
        expected = reference.jitter(image.astype(float), colour, draws[row])
        assert np.abs(expected - view.image[row].permute(1, 2, 0).numpy()).max() <= 0.51


def dots_image(centers_px: np.ndarray, size_px: int, sigma_px: float) -> np.ndarray:
    """One Gaussian dot per colour channel, rendered at sub-pixel centres (3, 2), corner-based."""
    axis = np.arange(size_px) + 0.5
    image = np.empty((size_px, size_px, 3))
    for channel, (x, y) in enumerate(centers_px):
        image[..., channel] = np.exp(-((axis[None] - x) ** 2 + (axis[:, None] - y) ** 2) / (2 * sigma_px**2))
    return np.asarray(np.rint(image * 255), dtype=np.uint8)


SWEEPS: dict[str, dict[Draw, Range]] = {
    "rotation": {Draw.ANGLE_DEG: (-180, 180)},
    "scale": {Draw.MAGNIFICATION: (0.6, 2.0)},
    "translation": {Draw.SHIFT_X_FRAC: (-15 / 128, 15 / 128), Draw.SHIFT_Y_FRAC: (-15 / 128, 15 / 128)},
    "all": {
        Draw.ANGLE_DEG: (-45, 45),
        Draw.MAGNIFICATION: (0.6, 2.0),
        Draw.SHIFT_X_FRAC: (-15 / 128, 15 / 128),
        Draw.SHIFT_Y_FRAC: (-15 / 128, 15 / 128),
    },
    "crop": {
        Draw.ANGLE_DEG: (-45, 45),
        Draw.CROP: (1, 1),
        Draw.CROP_SIDE_FRAC: (0.5, 1),
        Draw.CROP_X_FRAC: (-0.2, 0.2),
        Draw.CROP_Y_FRAC: (-0.2, 0.2),
    },
}


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_keypoints_land_where_the_picture_shows_them(renderer: RendererName, sweep: str, mirrored: bool) -> None:
    rng = np.random.default_rng(3)
    count, size_px, sigma_px = 48, 224, 3.0
    geometry = GeometryConfig()
    draws = np.tile(PLAIN_DRAW, (count, 1))
    for column, (low, high) in SWEEPS[sweep].items():
        draws[:, column] = rng.permutation(np.linspace(low, high, count))
    boxes = np.column_stack([rng.uniform(100, 124, (count, 2)), rng.uniform(120, 200, count)]).astype(np.float32)
    centers_px = rng.uniform(80, 144, (count, 3, 2))
    images = [dots_image(centers, size_px, sigma_px) for centers in centers_px]
    (view,) = make_views(renderer, images, boxes, [draws], geometry, NO_COLOUR, mirror=np.full(count, mirrored))

    errors_px = []
    axis = np.arange(geometry.side_px) + 0.5
    for row in range(count):
        matrix = view.source_to_view_px[row].double().numpy()
        carried = centers_px[row] @ matrix[:, :2].T + matrix[:, 2]  # (3, 2)
        reach = 4.5 * sigma_px * math.sqrt((-1 if mirrored else 1) * np.linalg.det(matrix[:, :2])) + 3
        for channel, expected in enumerate(carried):
            if np.any(expected < reach) or np.any(expected > geometry.side_px - reach):
                continue  # the dot is cut off
            weight = view.image[row, channel].double().numpy()
            shown = np.array([(weight.sum(0) * axis).sum(), (weight.sum(1) * axis).sum()]) / weight.sum()
            errors_px.append(np.abs(shown - expected).max())
    assert len(errors_px) > 1.2 * count
    assert max(errors_px) < 0.1


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_mirrored_sample_is_the_mirrored_image(renderer: RendererName) -> None:
    """Flip image, box and keypoints by hand: the same view, the same keypoints in it, the same augmentation to undo."""
    rng = np.random.default_rng(5)
    count, height_px, width_px = 8, 160, 240
    geometry, colour = GeometryConfig(), ColourConfig()
    draws = draws_of(Augmentation(geometry, colour), count)
    images = [smooth_image(rng, height_px, width_px) for _ in range(count)]
    boxes = np.column_stack([rng.uniform(60, 180, count), rng.uniform(60, 100, count), rng.uniform(80, 300, count)])
    boxes[-1] = 0  # the whole image
    keypoints_px = rng.uniform(0, 160, (count, 21, 2))
    flipped_boxes = np.where(boxes[:, 2:] > 0, [width_px, 0, 0] + boxes * [-1, 1, 1], 0)
    flipped_keypoints_px = np.array([width_px, 0]) + keypoints_px * [-1, 1]

    everybody = np.ones(count, bool)
    (mirrored,) = make_views(renderer, images, boxes.astype(np.float32), [draws], geometry, colour, mirror=everybody)
    flipped = [np.ascontiguousarray(image[:, ::-1]) for image in images]
    (by_hand,) = make_views(renderer, flipped, flipped_boxes.astype(np.float32), [draws], geometry, colour)

    np.testing.assert_array_equal(mirrored.matrix, by_hand.matrix)
    assert (torch.linalg.det(mirrored.source_to_view_px[:, :, :2]) < 0).all()
    carried, expected = (
        np.einsum("nij,nkj->nki", matrix[:, :, :2], points) + matrix[:, None, :, 2]
        for matrix, points in (
            (mirrored.source_to_view_px.double().numpy(), keypoints_px),
            (by_hand.source_to_view_px.double().numpy(), flipped_keypoints_px),
        )
    )
    np.testing.assert_allclose(carried, expected, atol=1e-3)
    differences = (mirrored.image.int() - by_hand.image.int()).abs().numpy()
    assert differences.mean() < 0.05
    assert np.percentile(differences, 99.9) <= 6  # as far as either is from the oracle


def test_a_positive_angle_turns_clockwise_on_the_screen() -> None:
    """Dali's sign, not OpenCV's: with y down, +90 degrees takes a point on the right to the bottom."""
    draw = PLAIN_DRAW.copy()
    draw[Draw.ANGLE_DEG] = 90
    augmentation, _ = reference.view_matrices(CENTER_BOX, (224, 224), draw, 128)
    np.testing.assert_allclose(augmentation @ [0.5, 0, 1], [0, 0.5], atol=1e-9)


@pytest.mark.parametrize("number", [math.nan, 0.0, 1e-30, 1e-9])
def test_a_view_out_of_all_bounds_is_refused_before_the_kernel(number: float) -> None:
    matrices = np.array([[[0.5, 0, 3], [0, 0.5, 4]], [[number, 0, 3], [0, number, 4]]], np.float32)
    assert view_to_source(matrices[:1]).shape == (1, 6)
    with pytest.raises(UserError, match=r"geometry\.scale, data\.box_margin"):
        view_to_source(matrices)


@pytest.mark.parametrize(("height", "halvings"), [(2, 0), (3, 0), (4, 1), (7, 1), (8, 2), (40, 4)])
def test_halving_leaves_two_pixels(height: int, halvings: int) -> None:
    """However small a view shows an image, in the composition and in the oracle alike."""
    shrink = 128 / 100_000
    assert count_halvings(np.array([[height, 5000]]), np.array([shrink])).tolist() == [halvings]
    halved, count = reference.halve(np.zeros((height, 5000, 3)), shrink, fill=0)
    assert count == halvings
    assert halved.shape[0] == -(-height // 2**halvings) >= 2


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("size", [(719, 1279), (721, 1283), (1500, 801), (333, 447), (1087, 1999)])
def test_odd_sizes_lose_nothing_at_the_border(renderer: RendererName, size: tuple[int, int]) -> None:
    """As much of a minified view is white as the matrix says of a white image, on average over shifts below a pixel."""
    geometry, shifts = GeometryConfig(), 16
    for magnification in (0.6, 0.3, 0.15):
        draws = np.tile(PLAIN_DRAW, (shifts, 1))
        draws[:, Draw.MAGNIFICATION] = magnification
        draws[:, Draw.SHIFT_X_FRAC] = draws[:, Draw.SHIFT_Y_FRAC] = np.arange(shifts) / shifts / geometry.side_px
        images = [np.full((*size, 3), 255, np.uint8)] * shifts
        (view,) = make_views(renderer, images, np.zeros((shifts, 3), np.float32), [draws], geometry, NO_COLOUR)
        white = view.image[:, 0].double() / 255
        shown_px = torch.stack([white.sum(2).max(1).values, white.sum(1).max(1).values], dim=1).mean(dim=0)
        expected_px = view.source_to_view_px[0, 0, 0].double() * torch.tensor(size[::-1], dtype=torch.float64)
        torch.testing.assert_close(shown_px, expected_px, atol=0.05, rtol=0)


SMALL_PX = 1.25
"""Radius in view pixels up to which a dot is called small."""
RADII_PX = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
SPACING_PX = 20
SUPERSAMPLES = 8


def disc_image(centers_px: npt.NDArray[np.float64], radius_px: float, side_px: int) -> Image:
    """White discs on black, corner-based centres (N, 2) of any fraction; each pixel the mean of 8 x 8 samples."""
    image = np.zeros((side_px, side_px))
    reach = math.ceil(radius_px) + 1
    offsets = (np.arange(SUPERSAMPLES * (2 * reach + 1)) + 0.5) / SUPERSAMPLES
    for x, y in centers_px:
        left, top = math.floor(x) - reach, math.floor(y) - reach
        inside = (left + offsets[None] - x) ** 2 + (top + offsets[:, None] - y) ** 2 <= radius_px**2
        cover = inside.reshape(2 * reach + 1, SUPERSAMPLES, 2 * reach + 1, SUPERSAMPLES).mean(axis=(1, 3))
        image[top : top + 2 * reach + 1, left : left + 2 * reach + 1] += cover
    return np.repeat(np.rint(255 * image.clip(0, 1)).astype(np.uint8)[..., None], 3, axis=2)


def errors_of_dots_px(
    radius_px: float, images: int, side_px: int, minification: tuple[float, float], rng: np.random.Generator
) -> list[float]:
    """Distances between where dots are shown by the CPU renderer and where the matrix carries their centres.

    Args:
        radius_px: of the dots, in pixels of the view.
        images: how many, each with many dots and a turn, shift and minification of its own.
        side_px: of the view.
        minification: range of source pixels in a view pixel.
        rng: of everything that is drawn.
    """
    geometry = GeometryConfig(side_px=side_px)
    draws = np.tile(PLAIN_DRAW, (images, 1))
    draws[:, Draw.ANGLE_DEG] = rng.uniform(-45, 45, images)
    draws[:, [Draw.SHIFT_X_FRAC, Draw.SHIFT_Y_FRAC]] = rng.uniform(-0.1, 0.1, (images, 2))
    sources, centers = [], []
    for source_px in np.exp(rng.uniform(np.log(minification[0]), np.log(minification[1]), images)):
        source_side = round(source_px * side_px)
        source_px = source_side / side_px
        places = (
            np.stack(np.meshgrid(*[np.arange(1, side_px // SPACING_PX)] * 2), axis=-1).reshape(-1, 2)
        ) * SPACING_PX
        centers.append((places + rng.uniform(-1, 1, places.shape)) * source_px)
        sources.append(disc_image(centers[-1], radius_px * source_px, source_side))
    whole = np.zeros((images, 3), np.float32)
    (view,) = make_views("cpu", sources, whole, [draws], geometry, NO_COLOUR)
    errors, reach = [], math.ceil(radius_px) + 2
    for row, centers_px in enumerate(centers):
        matrix = view.source_to_view_px[row].double().numpy()
        picture = view.image[row, 0].double().numpy()
        for x, y in centers_px @ matrix[:, :2].T + matrix[:, 2]:
            left, top = math.floor(x) - reach, math.floor(y) - reach
            window = picture[max(top, 0) : top + 2 * reach + 1, max(left, 0) : left + 2 * reach + 1]
            if min(left, top) < 0 or window.shape != (2 * reach + 1, 2 * reach + 1):
                continue  # cut off
            axis = np.arange(2 * reach + 1) + 0.5
            shown = np.array([(window.sum(axis=0) * axis).sum(), (window.sum(axis=1) * axis).sum()]) / window.sum()
            errors.append(float(np.hypot(left + shown[0] - x, top + shown[1] - y)))
    return errors


def test_large_dots_in_minified_views_are_where_the_matrix_says() -> None:
    errors = errors_of_dots_px(2.0, 6, 128, (1.0, 5.0), np.random.default_rng(0))
    assert len(errors) > 100
    assert max(errors) < 0.1


@pytest.mark.slow
def test_small_dots_in_minified_views_are_off_by_aliasing(record: Record) -> None:
    rng = np.random.default_rng(1)
    found = {radius: np.array(errors_of_dots_px(radius, 120, 128, (1.0, 6.0), rng)) for radius in RADII_PX}
    small = np.concatenate([errors for radius, errors in found.items() if radius <= SMALL_PX])
    large = np.concatenate([errors for radius, errors in found.items() if radius > SMALL_PX])
    assert min(len(small), len(large)) > 5000
    figures = {
        "small_dots": len(small),
        "small_largest_px": round(float(small.max()), 3),
        "small_percentile_99_px": round(float(np.percentile(small, 99)), 3),
        "large_dots": len(large),
        "large_largest_px": round(float(large.max()), 3),
        "largest_px_by_radius_px": {str(radius): round(float(errors.max()), 3) for radius, errors in found.items()},
    }
    record("dots", views="cpu", small_radius_px=SMALL_PX, source_px_in_a_view_px=[1, 6], **figures)
    assert small.max() < 0.4
    assert np.percentile(small, 99) < 0.3
    assert large.max() < 0.1

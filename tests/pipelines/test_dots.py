"""How far small dots in minified views are from where the matrix carries them: aliasing of the unfiltered warp."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from tests.conftest import Record
from tests.pipelines.harness import NO_COLOUR, Image, make_views
from tests.pipelines.test_views import PLAIN_DRAW

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

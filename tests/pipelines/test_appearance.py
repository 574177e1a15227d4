"""The further augmentations of the paper's study: each renderer against the float64 oracle, one by one and together."""

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from scipy import stats

from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.render.appearance_cpu import change_views
from peclr_dali.pipelines.render.appearance_tensors import change_tensors
from peclr_dali.pipelines.views.appearance import MAX_BLUR_SIGMA_PX, ORDER
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from tests.pipelines import harness, reference
from tests.pipelines.harness import NO_COLOUR, RENDERERS, Image, RendererName, make_views, smooth_image
from tests.pipelines.test_views import CENTER_BOX, PLAIN_DRAW, differences_from_oracle

OPTIONS = [column.name.lower() for column in ORDER]


def switched_on(probability: float, *options: str) -> AppearanceConfig:
    keys: dict[str, Any] = {f"{option}_probability": probability for option in options}
    return AppearanceConfig(**keys)


ALWAYS = {option: switched_on(1, option) for option in OPTIONS}
ALL = switched_on(0.5, *OPTIONS)
CROPPED = GeometryConfig(crop_probability=0.5, flip_probability=0.5)


def draws_of(appearance: AppearanceConfig, geometry: GeometryConfig, count: int) -> FloatArray:
    return harness.draws_of(Augmentation(geometry, ColourConfig(), appearance), count)


def views_of(
    renderer: RendererName, images: list[Image], draws: FloatArray, appearance: AppearanceConfig
) -> list[Image]:
    """Each whole image of side S as one view of side S, so that pixels are only changed by `appearance`."""
    geometry = GeometryConfig(side_px=images[0].shape[0])
    boxes, still = np.zeros((len(images), 3), np.float32), draws.copy()
    still[:, : Draw.MAGNIFICATION + 1] = PLAIN_DRAW[: Draw.MAGNIFICATION + 1]
    (view,) = make_views(renderer, images, boxes, [still], geometry, NO_COLOUR, appearance=appearance)
    return list(view.image.permute(0, 2, 3, 1).numpy())


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("option", [*ALWAYS, "all"])
def test_pixels_agree_with_the_oracle(renderer: RendererName, option: str) -> None:
    rng = np.random.default_rng(0)
    appearance = ALWAYS.get(option, ALL)
    geometry = CROPPED if option == "all" else GeometryConfig()
    colour = ColourConfig(jitter="hsv" if option == "all" else "none")
    count = 24 if option == "all" else 10
    images = [smooth_image(rng, 224, 224) for _ in range(count)]
    boxes, draws = np.tile(CENTER_BOX, (count, 1)), draws_of(appearance, geometry, count)
    (view,) = make_views(renderer, images, boxes, [draws], geometry, colour, appearance=appearance)

    differences, _ = differences_from_oracle(view, images, boxes, draws, Augmentation(geometry, colour, appearance))
    assert len(differences) > 50_000
    assert differences.mean() <= 1.0
    assert np.percentile(differences, 99.9) <= 6


def test_the_oracle_equals_opencv_where_opencv_has_the_function() -> None:
    image = smooth_image(np.random.default_rng(0), 40, 40, 2).astype(np.float64)
    grey = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2GRAY).astype(np.float64)
    x, y = (cv2.Sobel(grey, cv2.CV_64F, dx, 1 - dx, ksize=3) for dx in (1, 0))
    np.testing.assert_allclose(reference.sobel(image)[..., 0], np.hypot(x, y), atol=1e-3)
    for sigma_px in (0.1, 0.7, 2.0):
        taps = 2 * int(np.ceil(3 * sigma_px)) + 1
        np.testing.assert_allclose(
            reference.blur(image, sigma_px), cv2.GaussianBlur(image, (taps, taps), sigma_px), atol=1e-6
        )


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("side_px", [8, 33])
def test_the_widest_blur_mirrors_the_smallest_view(renderer: RendererName, side_px: int) -> None:
    """Its window is wider than the view, which is mirrored more than once."""
    rng = np.random.default_rng(0)
    appearance = AppearanceConfig(blur_probability=1, blur_sigma_px=(0.1, MAX_BLUR_SIGMA_PX))
    sigmas_px = [0.1, 0.34, 1.0, 1.5, 7.3, MAX_BLUR_SIGMA_PX]
    images = [rng.integers(0, 256, (side_px, side_px, 3), dtype=np.uint8) for _ in sigmas_px]
    draws = draws_of(appearance, GeometryConfig(side_px=side_px), len(sigmas_px))
    draws[:, Draw.BLUR_SIGMA_PX] = sigmas_px
    for image, draw, made in zip(images, draws, views_of(renderer, images, draws, appearance), strict=True):
        assert np.abs(reference.apply_appearance(image, appearance, draw).astype(int) - made).max() <= 1


@pytest.mark.parametrize("option", ALWAYS)
def test_tensors_of_many_views_equal_the_loops_over_each_view(option: str) -> None:
    """A GPU has the tensors and a CPU the loops; here a CPU computes both, the loops for a share of the views."""
    rng = np.random.default_rng(0)
    images = np.stack([smooth_image(rng, 20, 20, 2) for _ in range(140)])
    draws = draws_of(ALWAYS[option], GeometryConfig(side_px=20), len(images))
    column = Draw[option.upper()]
    draws[3::7, column] = 0
    changed, on_tensors = images.copy(), torch.from_numpy(images.copy())
    change_views(changed, np.arange(1, len(images), 2), draws, ALWAYS[option])
    change_tensors(on_tensors, draws, ALWAYS[option])
    assert (changed[::2] == images[::2]).all()
    off = draws[:, column] == 0
    assert (on_tensors.numpy()[off] == images[off]).all()
    assert (changed[off] == images[off]).all()
    in_loops, tensors = changed.astype(int), on_tensors.numpy().astype(int)
    in_loops[::2] = tensors[::2]
    if option == "blur":  # a sum of products, which one may round oftener
        assert np.abs(in_loops - tensors).max() <= 1
    else:
        np.testing.assert_array_equal(in_loops, tensors)
    for row in range(1, 30, 2):
        expected = reference.apply_appearance(images[row], ALWAYS[option], draws[row]).astype(int)
        # Noise and cut-outs are chosen in whole numbers, so nothing is rounded.
        assert np.abs(tensors[row] - expected).max() <= (0 if option in ("noise", "cut_out") else 1)


def test_noise_is_gaussian_and_independent_from_pixel_to_pixel_and_view_to_view() -> None:
    draws = draws_of(ALWAYS["noise"], GeometryConfig(), 40)
    draws[1, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]] = draws[0, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]]
    draws[1, Draw.NOISE_KEY_LOW] += 1  # neighbouring keys
    grey = [np.full((64, 64, 3), 128, np.uint8)] * len(draws)
    noise = np.stack(views_of("cpu", grey, draws, ALWAYS["noise"])).astype(int) - 128
    assert abs(noise.mean()) < 0.2  # half a million numbers: five standard errors
    assert abs(noise.std() - 25) < 0.15
    spread = np.random.default_rng(0).uniform(-0.5, 0.5, noise.size)  # undoes the rounding
    assert stats.kstest((noise.ravel() + spread) / 25, "norm").statistic < 0.003
    unit = noise / 25
    number = unit[0].size
    for other in (np.roll(unit, 1, 1), np.roll(unit, 1, 2), np.roll(unit, 1, 3), np.roll(unit, 1, 0)):
        assert np.abs((unit * other).reshape(len(unit), -1).mean(axis=1)).max() < 5 / np.sqrt(number)
    shifted = np.fft.fft(unit[0].ravel()) * np.fft.fft(unit[1].ravel()).conj()
    assert np.abs(np.fft.ifft(shifted)).max() < 6 * np.sqrt(number)  # at no shift are neighbouring keys alike

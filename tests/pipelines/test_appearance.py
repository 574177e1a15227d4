"""The further augmentations of the paper's study: both backends against the float64 oracle, one by one and composed."""

from __future__ import annotations

from typing import Literal

import cv2
import numpy as np
import pytest

from pipelines import reference
from pipelines.draws import AppearanceConfig, ColourConfig, Draw, FloatArray, GeometryConfig, draw_view
from tests.pipelines.harness import BACKENDS, Image, make_views, smooth_image
from tests.pipelines.test_views import CENTER_BOX, NO_COLOUR, far_from_fill

Backend = Literal["dali", "opencv"]

ALWAYS = {
    "sobel": AppearanceConfig(sobel_probability=1),
    "cut_out": AppearanceConfig(cut_out_probability=1),
    "blur": AppearanceConfig(blur_probability=1),
    "noise": AppearanceConfig(noise_probability=1),
    "colour_drop": AppearanceConfig(colour_drop_probability=1),
}
ALL = AppearanceConfig(
    sobel_probability=0.5,
    cut_out_probability=0.5,
    blur_probability=0.5,
    noise_probability=0.5,
    colour_drop_probability=0.5,
)
GEOMETRY = GeometryConfig()


def draws_of(appearance: AppearanceConfig, count: int, geometry: GeometryConfig = GEOMETRY) -> FloatArray:
    return draw_view(geometry, ColourConfig(), appearance, seed=1, epoch=0, view=0, positions=np.arange(count))


def whole(images: list[Image]) -> FloatArray:
    """Boxes of whole images."""
    return np.zeros((len(images), 3), np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", [*ALWAYS, "all"])
def test_pixels_agree_with_the_oracle(backend: Backend, option: str) -> None:
    rng = np.random.default_rng(0)
    appearance = ALWAYS.get(option, ALL)
    count = 10 if option in ALWAYS else 24
    images = [smooth_image(rng, 224, 224) for _ in range(count)]
    boxes, draws = np.tile(CENTER_BOX, (count, 1)), draws_of(appearance, count)
    (view,) = make_views(backend, images, boxes, [draws], GEOMETRY, NO_COLOUR, appearance=appearance)
    (plain,) = make_views(backend, images, boxes, [draws], GEOMETRY, NO_COLOUR)

    found, changed = [], 0
    for row, image in enumerate(images):
        expected = reference.make_view(image, boxes[row], draws[row], GEOMETRY, NO_COLOUR, appearance)
        made = view.image[row].permute(1, 2, 0).numpy()
        changed += bool((view.image[row] != plain.image[row]).any())
        checked = far_from_fill(view.source_to_view_px[row].numpy(), (224, 224), 128)
        if draws[row, Draw.SOBEL] or draws[row, Draw.BLUR]:  # which carry the border's jump inside
            checked = cv2.erode(checked.astype(np.uint8), np.ones((15, 15))) > 0
        found.append(np.abs(expected.astype(int) - made)[checked])
    differences = np.concatenate(found)
    assert changed >= 0.8 * count
    assert len(differences) > 50_000
    assert differences.mean() <= 1.0
    assert np.percentile(differences, 99.9) <= 6
    print(option, backend, differences.mean(), np.percentile(differences, 99.9), differences.max(), changed)

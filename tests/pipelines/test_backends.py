"""What a backend refuses."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.files.check import check_image
from pipelines.files.image_file import ImageFile
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from pipelines.views.draws import draw_view
from tests.pipelines import harness

Image = harness.Image


@pytest.mark.parametrize("more", [-1, 1])
def test_a_header_with_another_size_than_the_decoded_image_is_refused(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(data: Image) -> ImageFile:
        file = check_image(data)
        height, width = file.size_px
        return file._replace(size_px=(height, width + more))

    geometry, colour = GeometryConfig(side_px=16), ColourConfig(jitter="none")
    images = [harness.smooth_image(np.random.default_rng(0), 40, 50)] * 2
    box_px = np.array([[20, 20, 30]] * 2, np.float32)
    draws = [draw_view(Augmentation(geometry, colour), seed=0, epoch=0, view=0, places=np.arange(2))]
    monkeypatch.setattr(harness, "check_image", check)
    with pytest.raises(RuntimeError, match=r"(?s)40 50\].* their headers say .*40 " + str(50 + more)):
        harness.make_views("cpu", images, box_px, draws, geometry, colour)

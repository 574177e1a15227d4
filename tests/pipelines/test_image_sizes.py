from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peclr_dali.pipelines.render.settings import samples_in_chunk
from peclr_dali.pipelines.samples.image_sizes import sampled_sizes_px
from peclr_dali.pipelines.samples.index import Index


def test_the_largest_image_of_a_sample_is_found(tmp_path: Path) -> None:
    names = [f"{number:02}.jpg" for number in range(40)]
    for name in names:
        Image.new("RGB", (64, 48)).save(tmp_path / name)
    index = Index("images", tmp_path, names, np.zeros((40, 3), np.float32))
    assert sampled_sizes_px(index).max(0).tolist() == [48, 64]
    (tmp_path / names[0]).write_bytes(b"not an image")
    (tmp_path / names[20]).unlink()
    assert sampled_sizes_px(index).max(0).tolist() == [48, 64]
    Image.new("RGB", (513, 512)).save(tmp_path / names[39], "PNG")  # whatever its name says
    assert sampled_sizes_px(index).max(0).tolist() == [512, 513]


@pytest.mark.parametrize(
    ("width", "height", "samples"), [(224, 224, 256), (1280, 720, 97), (4032, 3024, 7), (10_000, 10_000, 1)]
)
def test_a_chunk_of_large_images_is_small(width: int, height: int, samples: int) -> None:
    assert samples_in_chunk(width * height) == samples

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peclr_dali.pipelines.loader import PixelBuffers
from peclr_dali.pipelines.render.settings import samples_in_chunk
from peclr_dali.pipelines.samples.box_check import sampled_sizes_px
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


def test_a_buffer_is_reused_only_when_nothing_refers_to_it() -> None:
    buffers = PixelBuffers((4, 8, 8, 3))
    first = buffers.tensor()
    address = first.data_ptr()
    first.fill_(7)
    view = first[1:3].permute(0, 3, 1, 2)
    del first
    other = buffers.tensor()
    other.fill_(9)
    assert other.data_ptr() != address  # a view of the first one is still in use
    assert (view == 7).all()
    del view
    assert buffers.tensor().data_ptr() == address
    del buffers
    assert (other == 9).all()

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from peclr_dali.pipelines.batch import BatchMemory
from peclr_dali.pipelines.files.check import image_sizes_px, spread
from peclr_dali.pipelines.render.settings import samples_in_chunk
from peclr_dali.pipelines.samples.index import Index


def test_sizes_are_those_of_the_headers(tmp_path: Path) -> None:
    """Whatever the name says; 0 without an image; turned as displayed, or as stored."""
    Image.new("RGB", (513, 512)).save(tmp_path / "a.jpg", "PNG")
    (tmp_path / "b.jpg").write_bytes(b"not an image")
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (64, 48)).save(tmp_path / "c.jpg", exif=exif)
    index = Index("images", tmp_path, ["a.jpg", "b.jpg", "c.jpg", "missing.jpg"], np.zeros((4, 3), np.float32))
    assert image_sizes_px(index.read, range(4)).tolist() == [[512, 513], [0, 0], [64, 48], [0, 0]]
    assert image_sizes_px(index.read, range(4), stored=True).tolist() == [[512, 513], [0, 0], [48, 64], [0, 0]]
    assert [spread(0, 3), spread(2, 3), spread(9, 3)] == [[], [0, 1], [0, 4, 8]]


@pytest.mark.parametrize(
    ("width", "height", "samples"), [(224, 224, 256), (1280, 720, 97), (4032, 3024, 7), (10_000, 10_000, 1)]
)
def test_a_chunk_of_large_images_is_small(width: int, height: int, samples: int) -> None:
    assert samples_in_chunk(width * height) == samples


def test_a_buffer_is_reused_only_when_nothing_refers_to_it() -> None:
    memory = BatchMemory(4, [8], torch.device("cpu"), torch.device("cpu"))
    first = memory.batch(np.arange(4)).views[0].image
    address = first.data_ptr()
    first.fill_(7)
    view = first[1:3]
    del first
    other = memory.batch(np.arange(4)).views[0].image
    other.fill_(9)
    assert other.data_ptr() != address  # a view of the first one is still in use
    assert (view == 7).all()
    del view
    assert memory.batch(np.arange(4)).views[0].image.data_ptr() == address
    del memory
    assert (other == 9).all()

"""Every peer makes the views that it says, and they are the same views."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from peclr_dali.bench.peers import dali_plain, opencv, workers
from peclr_dali.bench.peers.workers import Draws, Files
from peclr_dali.pipelines.views.augmentation import ColourConfig, GeometryConfig
from tests.pipelines.harness import smooth_image

VIEW_PX = 96
IDENTITY = Draws(0.0, 0.0, 0.0, 1.0, hue=1.0, saturation=1.0, value=1.0, value_shift=0.0)
TURNED = IDENTITY._replace(rotation_deg=20.0, x_frac=0.1, y_frac=0.1, scale=1.5)
JITTERED = TURNED._replace(hue=0.7, saturation=0.6, value=0.8, value_shift=20 / 255)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A soft picture, twelve times."""
    picture = smooth_image(np.random.default_rng(0), 150, 200, 3)
    cv2.imwrite(str(tmp_path / "picture.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 100])
    return Files([str(tmp_path / "picture.jpg")] * 12, np.array([[100, 75, 60]] * 12, np.float32), VIEW_PX)


def test_peers_draw_what_the_paper_draws() -> None:
    geometry, colour, drawn_from = GeometryConfig(), ColourConfig(), workers.RANGES
    assert (drawn_from.rotation_deg, drawn_from.scale) == (geometry.rotation_deg, geometry.scale)
    assert drawn_from.x_frac == drawn_from.y_frac == (-geometry.translation_frac, geometry.translation_frac)
    assert drawn_from[4:7] == (colour.hue, colour.saturation, colour.value_scale)


def test_every_sample_once_an_epoch() -> None:
    samples = list(itertools.chain.from_iterable(itertools.islice(workers.endless_batches(7, 3), 14)))
    for epoch in range(6):
        assert sorted(samples[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert samples[:7] != samples[7:14] or samples[:7] != samples[14:21]


def first_view(peer: str, files: Files, draws: Draws, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """(3, S, S) float32 in levels of 255: a peer's view of the picture."""
    if peer == "dali_plain":
        draws = draws._replace(hue=0.0)  # which is added
        monkeypatch.setattr(dali_plain, "RANGES", Draws(*((value, value + 1e-6) for value in draws)))
        return unnormalised(torch.from_numpy(np.asarray(next(dali_plain.batches(files, 1, 2))[0][0])))
    monkeypatch.setattr(opencv, "draw", lambda *shape: Draws(*(np.full(shape, value) for value in draws)))
    if peer == "opencv_authors":
        first, matrices_px, _, _ = opencv.make_batch_as_authors(files, [0, 1])
        corners = torch.tensor([[85.0, 115, 100], [60, 60, 90], [1, 1, 1]])
        exact_px = torch.from_numpy(opencv.opencv_matrices(files.boxes_px[0], draws, VIEW_PX)).float()
        assert (matrices_px[0] @ corners - exact_px @ corners).abs().max() < 3  # the crop has whole pixels
        return unnormalised(first[0])
    made = opencv.make_batch(files, [0, 1])
    assert made.shape == (2, 2, 3, VIEW_PX, VIEW_PX)
    assert made.is_shared()  # type: ignore[no-untyped-call]  # as the worker filled it
    assert made[0].is_contiguous(memory_format=torch.channels_last)
    view: torch.Tensor = made[0, 0].float()
    return view


def unnormalised(view: torch.Tensor) -> torch.Tensor:
    mean, deviation = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    assert view.dtype == torch.float32
    return (view * deviation + mean) * 255


@pytest.mark.parametrize(
    ("peer", "draws", "levels"),
    [
        ("opencv_authors", JITTERED, 3),  # its crop has whole pixels
        ("dali_plain", TURNED, 1),
    ],
)
def test_peers_show_the_same(
    peer: str, draws: Draws, levels: float, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One augmentation of a picture, beside that of tuned OpenCV; with the colours of peers that jitter alike."""
    difference = first_view(peer, files, draws, monkeypatch) - first_view("opencv_tuned", files, draws, monkeypatch)
    assert difference.abs().mean() < levels

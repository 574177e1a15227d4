import itertools
import pkgutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from peclr_dali.bench.loaders.peers import PEERS, Peer, dali, installed_peers, opencv, paper_draws, workers
from peclr_dali.bench.loaders.peers.opencv import AuthorsSamples, OpencvSamples, OpencvViews, hsv_table, jitter_hsv
from peclr_dali.bench.loaders.peers.paper_draws import VIEW_PX, PeerDraw, draw, endless_batches, source_to_view_px
from peclr_dali.bench.loaders.peers.torchvision_v2 import TorchvisionViews
from peclr_dali.bench.loaders.peers.workers import ViewsOfFiles
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE

IDENTITY = PeerDraw(rotation_deg=0, x_frac=0, y_frac=0, scale=1, hue=1, saturation=1, value=1, value_shift=0)
LEVELS = list(range(10, 250, 20))
HEIGHT, WIDTH = 150, 200
BoxArray = npt.NDArray[np.float32]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """One gray image of each level."""
    files = [tmp_path / f"{level}.jpg" for level in LEVELS]
    for file, level in zip(files, LEVELS, strict=True):
        cv2.imwrite(str(file), np.full((HEIGHT, WIDTH, 3), level, np.uint8))
    return files


@pytest.fixture
def boxes_px() -> BoxArray:
    boxes_px = np.tile(np.array([100, 75, 60], np.float32), (len(LEVELS), 1))
    boxes_px[-1] = WHOLE_IMAGE
    return boxes_px


def shared(tensor: Any) -> bool:
    return bool(tensor.is_shared())


def arrays(samples: Any) -> list[npt.NDArray[Any]]:
    return [np.asarray(sample) for sample in samples]


@pytest.mark.slow  # starts every installed peer
@pytest.mark.filterwarnings("ignore:The distutils package:DeprecationWarning")  # FFCV's
@pytest.mark.parametrize("peer", installed_peers().values(), ids=installed_peers())
def test_peer_hands_over_whole_batches_beyond_an_epoch(peer: Peer, paths: list[Path], boxes_px: BoxArray) -> None:
    sizes = peer.start(paths, boxes_px, 2, 5)
    assert list(itertools.islice(sizes, 6)) == [5] * 6
    sizes.close()


def test_every_sample_once_an_epoch() -> None:
    samples = list(itertools.chain.from_iterable(itertools.islice(endless_batches(7, 3), 14)))
    for epoch in range(6):
        assert sorted(samples[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert samples[:7] != samples[7:14] or samples[:7] != samples[14:21]


def test_draws_fill_their_ranges() -> None:
    draws = draw(4000, np.random.default_rng(0))
    ranges = {
        "rotation_deg": (-45, 45), "x_frac": (-15 / 128, 15 / 128), "y_frac": (-15 / 128, 15 / 128), "scale": (0.6, 2),
        "hue": (0.01, 1), "saturation": (0.01, 1), "value": (0.5, 1), "value_shift": (5 / 255, 20 / 255),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        values = np.array([getattr(one, name) for one in draws])
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high


@pytest.mark.parametrize("kind", [OpencvViews, TorchvisionViews])
def test_views_of_dataloader_peers(
    kind: type[ViewsOfFiles], paths: list[Path], boxes_px: BoxArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "draw", lambda count, rng: [IDENTITY] * count)
    views = kind(paths, boxes_px).__getitems__(range(len(paths)))
    assert views.shape == (2, len(paths), 3, VIEW_PX, VIEW_PX)
    assert views.dtype == torch.uint8
    assert shared(views)
    assert views[0].is_contiguous(memory_format=torch.channels_last)
    assert views[:, :, :, 64, 64].tolist() == [[[level] * 3 for level in LEVELS]] * 2
    corners = views[0, :, 0, 0, 0].tolist()
    assert corners == [*LEVELS[:-1], 0]  # only the whole image's square reaches beyond the image


def test_views_of_lean_opencv(paths: list[Path], boxes_px: BoxArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencv, "draw", lambda count, rng: [IDENTITY] * count)
    samples = OpencvSamples(paths, boxes_px)
    first, matrix_px, second, _ = (
        torch.stack(part) for part in zip(*map(samples.__getitem__, range(len(paths))), strict=True)
    )
    assert first.shape == second.shape == (len(paths), 3, VIEW_PX, VIEW_PX)
    assert first.dtype == torch.uint8
    assert torch.stack([first, second])[:, :, :, 64, 64].tolist() == [[[level] * 3 for level in LEVELS]] * 2
    assert first[:, 0, 0, 0].tolist() == [*LEVELS[:-1], 0]
    np.testing.assert_allclose(matrix_px[0], source_to_view_px((100, 75, 60), IDENTITY), rtol=1e-6)


def test_the_authors_steps_show_what_one_warp_shows(paths: list[Path]) -> None:
    file = paths[0].with_name("picture.png")
    coarse = np.random.default_rng(0).integers(60, 200, (12, 16, 3), np.uint8)
    cv2.imwrite(str(file), cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC))
    box_px = (100.0, 75.0, 60.0)  # far from the image's edge, where the authors' crop is cut off
    one = PeerDraw(30, 0.1, -0.05, 1.5, hue=1, saturation=1, value=1, value_shift=0)
    source = cv2.cvtColor(np.asarray(cv2.imread(str(file))), cv2.COLOR_BGR2RGB)
    theirs, matrix_px = AuthorsSamples([file], np.array([box_px], np.float32))._view(source, box_px, one)
    lean, lean_matrix_px = OpencvSamples([file], np.array([box_px], np.float32))._view(source, box_px, one)
    assert theirs.shape == (3, VIEW_PX, VIEW_PX)
    assert theirs.dtype == torch.float32
    mean, deviation = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    assert ((theirs * deviation + mean) * 255 - lean).abs().mean() < 6
    corners = torch.tensor([[85.0, 115, 100], [60, 60, 90], [1, 1, 1]])
    assert (
        matrix_px @ corners - lean_matrix_px @ corners
    ).abs().max() < 3  # whole pixels in the crop, half a pixel in its frame


@pytest.mark.slow  # starts worker processes
def test_opencv_in_workers(paths: list[Path], boxes_px: BoxArray) -> None:
    batches = iter(OpencvSamples.batches(paths, boxes_px, 2, 4))
    first, matrix_px, second, _ = next(batches)
    assert first.shape == second.shape == (4, 3, VIEW_PX, VIEW_PX)
    other = next(batches)  # the other worker's, which draws otherwise
    assert not torch.equal(matrix_px, other[1])
    views = next(iter(OpencvViews.batches(paths, boxes_px, 1, 4)))
    assert views.shape == (2, 4, 3, VIEW_PX, VIEW_PX)
    assert shared(views)  # as the worker filled it


def test_opencv_ways_of_the_jitter_agree() -> None:
    view = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    one = PeerDraw(0, 0, 0, 1, hue=0.7, saturation=0.6, value=0.8, value_shift=20 / 255)
    hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV)
    by_table = cv2.cvtColor(cv2.LUT(hsv, hsv_table(one)), cv2.COLOR_HSV2RGB)
    assert np.abs(jitter_hsv(view, one).astype(int) - by_table).mean() < 3  # one rounds, the other cuts off


def test_opencv_matrix_carries_the_box() -> None:
    matrix = source_to_view_px((100, 75, 60), IDENTITY)
    corner_based = matrix @ [100 - 30 - 0.5, 75 - 30 - 0.5, 1] + 0.5
    np.testing.assert_allclose(corner_based, [0, 0], atol=1e-12)
    turned = PeerDraw(90, 0.1, 0, 2, 1, 1, 1, 0)
    below = source_to_view_px((100, 75, 60), turned) @ [100 + 15 - 0.5, 75 - 0.5, 1] + 0.5  # the right becomes below
    np.testing.assert_allclose(below, [64 + 12.8, 64 + 64], atol=1e-9)


def test_hsv_table_is_the_papers_jitter() -> None:
    table = hsv_table(PeerDraw(0, 0, 0, 1, hue=0.5, saturation=0.25, value=0.5, value_shift=20 / 255))
    assert table[0, 100].tolist() == [50, 25, 70]
    assert hsv_table(PeerDraw(0, 0, 0, 1, 1, 1, 1, 20 / 255))[0, 250, 2] == 255


def test_dali_decodes_every_image(paths: list[Path], boxes_px: BoxArray) -> None:
    batches = itertools.islice(dali.sources(paths, boxes_px, 2, 4), 3)
    levels = [int(image[0, 0, 0]) for sources, *_ in batches for image in arrays(sources)]
    assert sorted(levels) == LEVELS


def test_dali_views(paths: list[Path], boxes_px: BoxArray, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HUE": 0, "SATURATION": 1, "VALUE": 1, "SCALE": 1, "SHIFT_FRAC": 0, "ROTATION_DEG": 0}.items():
        monkeypatch.setattr(paper_draws, name, (float(value), float(value) + 1e-6))
    first, second = (np.stack(arrays(views)) for views in next(dali.views(paths, boxes_px, 2, len(paths))))
    assert first.shape == second.shape == (len(paths), 3, VIEW_PX, VIEW_PX)
    assert first.dtype == np.float32
    red = first[:, 0] * 0.229 * 255 + 0.485 * 255
    order = np.argsort(red[:, 64, 64])
    np.testing.assert_allclose(red[order, 64, 64], LEVELS, atol=1.01)
    np.testing.assert_allclose(red[order, 0, 0], [*LEVELS[:-1], 0], atol=1.01)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_entry_names_a_function(peer: Peer) -> None:
    if peer.needs is None:
        assert callable(pkgutil.resolve_name(f"peclr_dali.bench.loaders.peers.{peer.function}"))
        return
    module, _, function = peer.function.partition(":")
    source = (Path(opencv.__file__).with_name(f"{module}.py")).read_text()
    assert f"def {function}(" in source


@pytest.mark.filterwarnings("ignore:The distutils package:DeprecationWarning")
def test_ffcv_makes_the_views_that_opencv_makes() -> None:
    ffcv_packed = pytest.importorskip(
        "peclr_dali.bench.loaders.peers.ffcv_packed", reason="needs FFCV", exc_type=ImportError
    )
    coarse = np.random.default_rng(0).integers(60, 200, (12, 16, 3), np.uint8)
    source = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    one = PeerDraw(30, 0.1, -0.05, 1.5, hue=0.7, saturation=0.6, value=0.8, value_shift=20 / 255)
    out = np.empty((VIEW_PX, VIEW_PX, 3), np.uint8)
    numbers = np.array([getattr(one, name) for name in PeerDraw.__dataclass_fields__])
    ffcv_packed.make_view(source, np.array([100, 75, 60], np.float32), numbers, out, VIEW_PX)
    warped = cv2.warpAffine(source, source_to_view_px((100, 75, 60), one), (VIEW_PX, VIEW_PX))
    assert np.abs(out.astype(int) - jitter_hsv(warped, one)).mean() < 3  # OpenCV's HSV has 8 bits

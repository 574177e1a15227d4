"""The same graph on a GPU: what its nodes are, what it gives, and that the loader loses nothing there.

Without a GPU only the placement of the nodes can be shown.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline

from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.render.dali_graph import decode_pipeline, view_pipeline
from peclr_dali.pipelines.render.renderers import CpuViews, DaliViews, FusedViews, make_renderer
from peclr_dali.pipelines.render.settings import choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from tests.conftest import Record
from tests.pipelines import reference
from tests.pipelines.harness import (
    NO_APPEARANCE,
    NO_COLOUR,
    Image,
    assert_equal,
    draws_of,
    encode,
    jpeg,
    load,
    make_views,
    settings_of,
    smooth_image,
    write_jpegs,
)
from tests.pipelines.test_appearance import ALL, ALWAYS
from tests.pipelines.test_loader import COLOURS, assert_replaced, write_mixture
from tests.pipelines.test_views import CENTER_BOX, far_from_fill, near_hue_cut

Jitter = Literal["none", "hsv", "linear"]
GpuViews = Literal["fused", "graph"]
WAYS: tuple[GpuViews, GpuViews] = ("fused", "graph")
BOTH = pytest.mark.parametrize("gpu_views", WAYS)
SMALL = Augmentation(GeometryConfig(side_px=32), NO_COLOUR)
TWO_SIZES = [SMALL, Augmentation(GeometryConfig(side_px=16), NO_COLOUR)]


def as_jpeg(image: Image) -> Image:
    """With chroma at half the resolution, as cameras write it."""
    sampling = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, cv2.IMWRITE_JPEG_QUALITY, 95)
    return np.frombuffer(jpeg(image, *sampling), np.uint8)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The output nodes of the pipelines that a test defines; building one would look for a GPU."""
    nodes: list[Any] = []
    monkeypatch.setattr(Pipeline, "set_outputs", lambda self, *given: nodes.extend(given))
    monkeypatch.setattr(Pipeline, "build", lambda self: None)
    return nodes


@pytest.mark.parametrize("jitter", ["none", "hsv", "linear"])
@pytest.mark.parametrize("antialias", [True, False])
def test_pixels_are_made_on_the_gpu_and_matrices_on_the_cpu(
    jitter: Jitter, antialias: bool, outputs: list[Any]
) -> None:
    augmentation = Augmentation(GeometryConfig(antialias=antialias), ColourConfig(jitter=jitter))
    view_pipeline(settings_of(4, device="gpu"), [augmentation] * 2, iter([]))
    assert [node.device for node in outputs] == ["gpu", "cpu", "cpu"] * 2


def test_decoded_images_are_on_the_gpu_for_its_kernel(outputs: list[Any]) -> None:
    decode_pipeline(settings_of(4, device="gpu"), iter([]))
    assert [node.device for node in outputs] == ["gpu"]


@pytest.mark.parametrize(
    ("device", "backend", "gpu_views", "made_by"),
    [
        ("cuda", "auto", "fused", FusedViews),
        ("cuda", "dali", "fused", FusedViews),
        ("cuda", "auto", "graph", DaliViews),
        ("cuda", "cpu", "fused", CpuViews),
        ("cpu", "dali", "fused", DaliViews),
        ("cpu", "auto", "fused", CpuViews),
    ],
)
def test_the_kernel_is_chosen_on_a_gpu_only(
    device: str,
    backend: Literal["auto", "dali", "cpu"],
    gpu_views: GpuViews,
    made_by: type,
    folder: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "cc")
    config = PipelinesConfig(backend=backend, gpu_views=gpu_views, threads=1)
    made = make_renderer(choose_settings(folder, config, torch.device(device), rows=4), [SMALL])
    assert type(made) is made_by
    made.close()


def test_the_graphs_views_are_waited_for_later_and_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI's outputs are held until then: its executor reuses the memory of an output to which nothing refers."""
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", event)
    image, matrix = Mock(), Mock()
    image.as_tensor.return_value = np.full((2, 4, 4, 3), 7, np.uint8)
    matrix.as_tensor.return_value = np.ones((2, 2, 3), np.float32)
    view = View(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3))
    held = weakref.ref(image)
    made = DaliViews(settings_of(2, device="gpu"), [SMALL])
    finish = made.write((image, matrix, matrix), Mock(draws=[None]), [view])
    event.assert_called_once_with(blocking=True)
    event.return_value.record.assert_called_once_with()
    event.return_value.synchronize.assert_not_called()
    del image
    assert held() is not None
    finish()
    event.return_value.synchronize.assert_called_once_with()
    assert (view.image == 7).all()
    assert (view.matrix == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("jitter", ["none", "hsv", "linear"])
@pytest.mark.parametrize("fill", [0, "edge"])
def test_views_on_a_gpu_equal_those_on_a_cpu(
    kind: Literal["png", "jpeg"], jitter: Jitter, fill: int | Literal["edge"], record: Record
) -> None:
    """PNG decodes to equal pixels everywhere. JPEG may differ by a level or two, since nvJPEG rounds its inverse
    cosine transform in its own way; both interpolate the chroma, which is asked for on the GPU."""
    rng = np.random.default_rng(0)
    geometry, colour = GeometryConfig(fill=fill), ColourConfig(jitter=jitter)
    sizes = [(224, 224)] * 9 + [(180, 320), (300, 200), (61, 45), (900, 700)]
    images = [smooth_image(rng, *size) for size in sizes]
    boxes = np.array([CENTER_BOX] * 9 + [[160, 90, 120], [90, 160, 290], [0, 0, 0], [0, 0, 0]], np.float32)
    draws = [draws_of(Augmentation(geometry, colour), len(images), view=view) for view in range(2)]
    encoder = encode if kind == "png" else as_jpeg

    def views(device: Literal["cpu", "gpu"], colour: ColourConfig) -> list[Any]:
        return make_views("dali", images, boxes, draws, geometry, colour, device=device, encode=encoder)

    found = []
    for ours, theirs, plain in zip(views("gpu", colour), views("cpu", colour), views("cpu", NO_COLOUR), strict=True):
        assert ours.image.is_cuda
        assert torch.equal(ours.matrix, theirs.matrix)
        assert torch.equal(ours.source_to_view_px, theirs.source_to_view_px)
        for row, size in enumerate(sizes):
            pixels = [image[row].permute(1, 2, 0).cpu().numpy() for image in (ours.image, theirs.image, plain.image)]
            checked = far_from_fill(ours.source_to_view_px[row].numpy(), size, geometry.side_px)
            if jitter == "hsv":
                checked &= ~near_hue_cut(pixels[2], margin=2.0 if kind == "png" else 6.0)
            found.append(np.abs(pixels[0].astype(int) - pixels[1])[checked])
    differences = np.concatenate(found)
    mean, largest = float(differences.mean()), float(np.percentile(differences, 99.9))
    record("gpu_pixels", kind=kind, jitter=jitter, fill=fill, mean=round(mean, 4), percentile_99_9=largest)
    assert len(differences) > 100_000
    assert mean <= 1.0
    assert largest <= 6


@pytest.mark.gpu
@pytest.mark.parametrize("jitter", ["none", "hsv", "linear"])
@pytest.mark.parametrize("fill", [0, "edge"])
def test_the_kernel_gives_the_views_of_the_graph(jitter: Jitter, fill: int | Literal["edge"], record: Record) -> None:
    """Within a level but for few pixels, since the graph rounds after every halving; the kernel's are the oracle's."""
    rng = np.random.default_rng(0)
    geometry, colour = GeometryConfig(fill=fill), ColourConfig(jitter=jitter)
    sizes = [(224, 224)] * 6 + [(180, 320), (61, 45), (301, 203)]
    images = [smooth_image(rng, *size) for size in sizes]
    boxes = np.array([[112, 112, 100]] * 6 + [[160, 90, 70], [20, 30, 40], [0, 0, 0]], np.float32)
    draws = [draws_of(Augmentation(geometry, colour), len(images), view=view) for view in range(2)]

    def views(backend: Literal["fused", "dali"]) -> list[Any]:
        return make_views(backend, images, boxes, draws, geometry, colour, device="gpu")

    found, from_oracle = [], []
    for ours, theirs, table in zip(views("fused"), views("dali"), draws, strict=True):
        assert torch.equal(ours.matrix, theirs.matrix)
        assert torch.equal(ours.source_to_view_px, theirs.source_to_view_px)
        for row, size in enumerate(sizes):
            pixels = [made.image[row].permute(1, 2, 0).cpu().numpy().astype(int) for made in (ours, theirs)]
            plain, expected = (
                reference.make_view(images[row], boxes[row], table[row], geometry, how) for how in (NO_COLOUR, colour)
            )
            sound = ~near_hue_cut(plain) if jitter == "hsv" else np.ones(plain.shape[:2], bool)
            from_oracle.append(np.abs(pixels[0] - expected)[sound].max())
            sound &= far_from_fill(ours.source_to_view_px[row].numpy(), size, geometry.side_px)
            found.append(np.abs(pixels[0] - pixels[1])[sound])
    differences = np.concatenate(found)
    share = float((differences > 1).mean())
    record(
        "gpu_pixels", kind="fused", jitter=jitter, fill=fill, mean=round(float(differences.mean()), 4), above_1=share
    )
    assert max(from_oracle) <= 1
    assert share < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("option", [*ALWAYS, "all"])
def test_a_gpu_changes_the_appearance_as_a_cpu_does(option: str) -> None:
    """Pixels that only the option changes; noise and holes to the bit, since they are chosen in whole numbers."""
    rng = np.random.default_rng(0)
    appearance = ALWAYS.get(option, ALL)
    geometry = GeometryConfig(rotation_deg=(0, 0), translation_frac=0, scale=(1, 1))
    images = [rng.integers(0, 256, (128, 128, 3), dtype=np.uint8) for _ in range(24)]
    boxes = np.zeros((len(images), 3), np.float32)
    draws = draws_of(Augmentation(geometry, NO_COLOUR, appearance), len(images))

    def view(device: Literal["cpu", "gpu"], appearance: AppearanceConfig) -> torch.Tensor:
        (made,) = make_views("dali", images, boxes, [draws], geometry, NO_COLOUR, device=device, appearance=appearance)
        return made.image.cpu().int()

    difference = (view("gpu", appearance) - view("cpu", appearance)).abs().double()
    if option in ("noise", "cut_out"):
        warped_alike = view("gpu", NO_APPEARANCE) == view("cpu", NO_APPEARANCE)
        assert warped_alike.double().mean() > 0.9
        assert not difference[warped_alike].any()
    assert difference.mean() <= 1
    assert difference.flatten()[::7].quantile(0.999) <= 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return write_jpegs(tmp_path_factory.mktemp("images"), 61)


def batches(index: Index, device: str, **options: Any) -> list[Batch]:
    """All kept until the last is there, so that memory that DALI takes back too early shows."""
    return load(index, TWO_SIZES, device=device, **{"backend": "dali", "chunk": 7, **options})


def assert_alike(ours: Batch, theirs: Batch) -> None:
    """Equal but for the rounding of pixels, of which each batch has many."""
    assert_equal(ours.to("cpu"), theirs.to("cpu"), within=255)
    for one, other in zip(ours.views, theirs.views, strict=True):
        differences = (one.image.cpu().int() - other.image.cpu().int()).abs().float()
        assert differences.mean() <= 1
        assert differences.quantile(0.99) <= 6  # the border of the fill is in it


@pytest.mark.gpu
@BOTH
def test_the_loader_gives_the_same_batches_on_a_gpu_and_on_a_cpu(gpu_views: GpuViews, folder: Index) -> None:
    made = batches(folder, "cuda:0", gpu_views=gpu_views)
    assert all(view.image.is_cuda and view.matrix.is_pinned() for batch in made for view in batch.views)
    assert all(view.image.is_contiguous(memory_format=torch.channels_last) for view in made[0].views)
    for ours, theirs in zip(made, batches(folder, "cpu"), strict=True):
        assert_alike(ours, theirs)


@pytest.mark.gpu
@BOTH
def test_a_consumer_on_a_side_stream_sees_whole_batches(gpu_views: GpuViews, folder: Index) -> None:
    expected = [batch.views[0].image.cpu() for batch in batches(folder, "cuda:0", gpu_views=gpu_views)]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for ours, theirs in zip(batches(folder, "cuda:0", gpu_views=gpu_views), expected, strict=True):
            assert torch.equal((ours.views[0].image + 0).cpu(), theirs)


@pytest.mark.gpu
@BOTH
def test_a_loader_resumed_within_an_epoch_goes_on_with_the_same_bits(gpu_views: GpuViews, folder: Index) -> None:
    whole, resumed = (batches(folder, "cuda:0", gpu_views=gpu_views, first=first) for first in (0, 4))
    for ours, theirs in zip(whole[4:], resumed, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.gpu
def test_the_kernel_s_loader_gives_the_graph_s_batches(folder: Index) -> None:
    """While other batches are decoded, and with chunks so small that memory which is freed early is reused."""
    fused, graph = (batches(folder, "cuda:0", gpu_views=gpu_views, chunk=2, last=30) for gpu_views in WAYS)
    for ours, theirs in zip(fused, graph, strict=True):
        assert_alike(ours, theirs)


@pytest.mark.gpu
@BOTH
def test_bad_files_are_replaced_and_no_other_sample_is_lost(
    gpu_views: GpuViews, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index, bad_names = write_mixture(tmp_path, plain=120, others=24)
    order = EpochOrder(168, 168, seed=0)
    made = batches(index, "cuda:0", batch=56, order=order, chunk=14, gpu_views=gpu_views)
    assert_replaced(index, order, made, bad_names, caplog)
    for batch in made:
        centers = batch.views[0].image[:, :, 15:17, 15:17].float().mean((2, 3)).cpu()
        for sample, center in zip(batch.samples[:, 0].tolist(), centers, strict=True):
            kind = index.paths[sample].split("_")[0]
            if kind in COLOURS:
                np.testing.assert_allclose(center, COLOURS[kind], atol=6)


@pytest.mark.gpu
def test_the_fast_path_of_a_cpu_feeds_a_gpu(folder: Index) -> None:
    """Backend "cpu" on a machine with a GPU: pixels stay in pinned memory until the step copies them."""
    made = batches(folder, "cuda:0", last=3, backend="cpu", chunk=None)
    for ours, theirs in zip(made, batches(folder, "cpu", last=3), strict=True):
        assert ours.views[0].image.is_pinned()
        assert_alike(ours, theirs)

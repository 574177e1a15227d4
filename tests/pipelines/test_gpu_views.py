"""Views on a GPU: what is made where, that it is what the oracle says, and that the loader loses nothing there.

Without a GPU only the choice, the places of the nodes and the order of the calls can be shown.
"""

from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import cv2
import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn

from peclr_dali import Index, PipelinesConfig, UserError
from peclr_dali.pipelines.batch import Batch, to_device
from peclr_dali.pipelines.render.dali_graph import decode_pipeline, view_pipeline
from peclr_dali.pipelines.render.renderers import CpuViews, DaliViews, GpuViews, make_renderer
from peclr_dali.pipelines.render.settings import choose_settings
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from tests.conftest import Record
from tests.pipelines.harness import (
    NO_APPEARANCE,
    NO_COLOUR,
    Image,
    assert_equal,
    draws_of,
    encode,
    index_of,
    jpeg,
    load,
    loader_of,
    make_views,
    settings_of,
    smooth_image,
    write_jpegs,
)
from tests.pipelines.test_appearance import ALL, ALWAYS
from tests.pipelines.test_loader import COLOURS, assert_replaced, write_mixture
from tests.pipelines.test_views import CENTER_BOX, differences_from_oracle

Jitter = Literal["none", "hsv"]
Place = Literal["cpu", "gpu"]
Made = Literal["cpu", "gpu", "dali"]
ON_GPU: tuple[tuple[Place, Made], ...] = (("gpu", "gpu"), ("cpu", "gpu"), ("gpu", "dali"), ("cpu", "dali"))
"""Every decoder with everything that makes views on a GPU."""

EACH = pytest.mark.parametrize(("decoder", "views"), ON_GPU)
SMALL = Augmentation(GeometryConfig(side_px=32), NO_COLOUR)
TWO_SIZES = [SMALL, Augmentation(GeometryConfig(side_px=16), NO_COLOUR)]
H100, RTX = (9, 0), (8, 6)


def as_jpeg(image: Image, sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420) -> Image:
    """With chroma at half the resolution, as cameras write it."""
    options = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_QUALITY, 95)
    return np.frombuffer(jpeg(image, *options), np.uint8)


def decoded(data: Image) -> Image:
    """A JPEG's pixels as the CPU's decoder gives them."""
    return np.ascontiguousarray(cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1])  # type: ignore[index]


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The output nodes of the pipelines that a test defines; building one would look for a GPU."""
    nodes: list[Any] = []
    monkeypatch.setattr(Pipeline, "set_outputs", lambda self, *given: nodes.extend(given))
    monkeypatch.setattr(Pipeline, "build", lambda self: None)
    return nodes


@pytest.mark.parametrize("decoder", ["cpu", "gpu"])
@pytest.mark.parametrize("jitter", ["none", "hsv"])
@pytest.mark.parametrize("antialias", [True, False])
def test_pixels_are_made_on_the_gpu_and_matrices_on_the_cpu(
    decoder: Place, jitter: Jitter, antialias: bool, outputs: list[Any]
) -> None:
    augmentation = Augmentation(GeometryConfig(antialias=antialias), ColourConfig(jitter=jitter))
    view_pipeline(settings_of(4, device="gpu", decoder=decoder), [augmentation] * 2, iter([]))
    assert [node.device for node in outputs] == ["gpu", "cpu", "cpu"] * 2


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize(
    ("decoder", "views", "images_on"), [("gpu", "gpu", "gpu"), ("cpu", "gpu", "gpu"), ("cpu", "cpu", "cpu")]
)
def test_decoded_images_are_where_views_are_made(
    decoder: Place, views: Made, images_on: str, regions: bool, outputs: list[Any]
) -> None:
    decode_pipeline(settings_of(4, device="gpu", decoder=decoder, views=views, regions=regions), iter([]))
    assert [node.device for node in outputs] == [images_on]


def test_a_gpu_decoder_has_memory_for_the_largest_images(outputs: list[Any]) -> None:
    """Without the hints its memory grew during the first batches, and training lost up to 12 % of its rate."""
    with patch.object(fn.decoders, "image", wraps=fn.decoders.image) as image:
        decode_pipeline(settings_of(4, device="gpu", size_hint_px=(720, 1280)), iter([]))
        decode_pipeline(settings_of(4, device="gpu", decoder="cpu"), iter([]))
    on_gpu, on_cpu = (call.kwargs for call in image.call_args_list)
    assert (on_gpu["preallocate_height_hint"], on_gpu["preallocate_width_hint"]) == (720, 1280)
    assert (on_gpu["device"], on_gpu["hw_decoder_load"]) == ("mixed", 1.0)
    assert on_cpu["device"] == "cpu"
    assert not [name for name in on_cpu if "hint" in name or "padding" in name]


@pytest.mark.parametrize(
    ("sizes", "hint_px"), [([(40, 56)], (64, 64)), ([(480, 640), (640, 479)], (640, 640)), ([(90, 5000)], (128, 4096))]
)
def test_the_hint_is_the_largest_sampled_size_rounded_up(
    sizes: list[tuple[int, int]], hint_px: tuple[int, int], tmp_path: Path
) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(np.zeros((*size, 3), np.uint8)))
    assert choose_settings(index_of(tmp_path), PipelinesConfig(), torch.device("cpu"), rows=2).size_hint_px == hint_px


@pytest.mark.parametrize(
    ("device", "capability", "compiler", "configured", "chosen", "why"),
    [
        ("cpu", None, True, {}, ("cpu", "cpu", CpuViews), "no GPU"),
        ("cpu", None, True, {"views": "dali"}, ("cpu", "dali", DaliViews), "as configured"),
        ("cuda", H100, True, {}, ("gpu", "gpu", GpuViews), "the GPU has JPEG engines"),
        ("cuda", RTX, True, {}, ("cpu", "gpu", GpuViews), "the GPU has no JPEG engines"),
        ("cuda", H100, False, {}, ("gpu", "dali", DaliViews), "headers: install gcc and python3-dev; the GPU has JPEG"),
        ("cuda", H100, True, {"decoder": "cpu"}, ("cpu", "gpu", GpuViews), "as configured"),
        ("cuda", RTX, True, {"decoder": "gpu", "views": "dali"}, ("gpu", "dali", DaliViews), "as configured"),
        ("cuda", H100, False, {"views": "cpu"}, ("cpu", "cpu", CpuViews), "as configured"),
    ],
)
def test_where_pixels_are_made(
    device: str,
    capability: tuple[int, int] | None,
    compiler: bool,
    configured: dict[str, Any],
    chosen: tuple[Place, Made, type],
    why: str,
    folder: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setenv("CC", "cc" if compiler else "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = choose_settings(folder, PipelinesConfig(**configured, threads=1), torch.device(device), rows=4)
    made = make_renderer(settings, [SMALL])
    assert (settings.decoder, settings.views, type(made)) == chosen
    assert why in settings.described
    made.close()


@pytest.mark.parametrize(
    ("device", "configured", "message"),
    [
        ("cpu", {"views": "gpu"}, 'pipelines.views = "gpu", and the batches are on the CPU: set "auto" or "cpu"'),
        ("cpu", {"decoder": "gpu"}, 'pipelines.decoder = "gpu", and the batches are on the CPU'),
        ("cuda", {"views": "gpu"}, 'pipelines.views = "gpu" needs a C compiler and Python'),
        ("cuda", {"decoder": "gpu", "views": "cpu"}, 'views = "cpu" needs images decoded there'),
    ],
)
def test_a_place_that_is_not_there_is_refused(
    device: str, configured: dict[str, Any], message: str, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises((UserError, ValueError), match=message):
        choose_settings(folder, PipelinesConfig(**configured), torch.device(device), rows=4)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("jitter", ["none", "hsv"])
@pytest.mark.parametrize("fill", [0, "edge"])
def test_views_on_a_gpu_are_the_oracle_s(
    decoder: Place, views: Made, kind: str, jitter: Jitter, fill: int | Literal["edge"], record: Record
) -> None:
    """Of PNG files, the kernel's views are within a level. The graph rounds after every halving, and JPEG files differ
    by a level or two before that, since nvJPEG rounds its inverse cosine transform in its own way."""
    rng = np.random.default_rng(0)
    geometry, colour = GeometryConfig(fill=fill), ColourConfig(jitter=jitter)
    sizes = [(224, 224)] * 9 + [(180, 320), (300, 200), (61, 45), (901, 703)]
    images = [smooth_image(rng, *size) for size in sizes]
    shown = images if kind == "png" else [decoded(as_jpeg(image)) for image in images]
    boxes = np.array([CENTER_BOX] * 9 + [[160, 90, 120], [90, 160, 290], [0, 0, 0], [0, 0, 0]], np.float32)
    draws = [draws_of(Augmentation(geometry, colour), len(images), view=view) for view in range(2)]
    made = make_views(
        views, images, boxes, draws, geometry, colour, device="gpu", decoder=decoder,
        encode=encode if kind == "png" else as_jpeg,
    )  # fmt: skip
    found = []
    for view, table in zip(made, draws, strict=True):
        assert view.image.is_cuda
        differences, near = differences_from_oracle(
            view, shown, boxes, table, Augmentation(geometry, colour), margin=1.0 if kind == "png" else 6.0
        )
        found.append(differences[~near])
    differences = np.concatenate(found)
    figures = {"mean": round(float(differences.mean()), 4), "percentile_99_9": float(np.percentile(differences, 99.9)),
               "largest": round(float(differences.max()), 2)}  # fmt: skip
    record("gpu_pixels", decoder=decoder, views=views, kind=kind, jitter=jitter, fill=fill, **figures)
    assert len(differences) > 100_000
    assert figures["mean"] <= 1.0
    assert figures["percentile_99_9"] <= 6
    if kind == "png" and views == "gpu":
        assert figures["largest"] <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decoder", "views", "hint_px"),
    [
        ("gpu", "gpu", (64, 64)),
        ("gpu", "gpu", (1024, 1024)),
        ("gpu", "dali", (64, 64)),
        ("cpu", "gpu", (0, 0)),
        ("cpu", "dali", (0, 0)),
    ],
)
def test_mixed_sizes_and_subsamplings_decode_with_any_hint(
    decoder: Place, views: Made, hint_px: tuple[int, int]
) -> None:
    """Images larger than the hint take time, and nothing else."""
    rng = np.random.default_rng(0)
    sizes = [(40, 56), (480, 640), (1280, 720), (720, 1280), (33, 801)] * 3
    factors = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
               cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411]  # fmt: skip
    images = [smooth_image(rng, *size) for size in sizes]
    sampling = {id(image): factors[number % len(factors)] for number, image in enumerate(images)}
    boxes, geometry = np.zeros((len(images), 3), np.float32), GeometryConfig(side_px=64)
    draws = draws_of(Augmentation(geometry, NO_COLOUR), len(images))

    def view(device: Place, **settings: Any) -> torch.Tensor:
        (made,) = make_views(
            "dali" if device == "cpu" else views, images, boxes, [draws], geometry, NO_COLOUR, device=device,
            encode=lambda image: as_jpeg(image, sampling[id(image)]), **settings,
        )  # fmt: skip
        return made.image.cpu().float()

    difference = (view("gpu", decoder=decoder, size_hint_px=hint_px) - view("cpu")).abs().flatten(1)
    assert difference.mean(1).max() <= 2
    assert difference.mean() <= 1


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
    return load(index, TWO_SIZES, device=device, **{"views": "dali", "chunk": 7, **options})


def assert_alike(ours: Batch, theirs: Batch) -> None:
    """Equal but for the rounding of pixels, of which each batch has many."""
    assert_equal([ours.to("cpu")], [theirs.to("cpu")], within=255)
    for one, other in zip(ours.views, theirs.views, strict=True):
        differences = (one.image.cpu().int() - other.image.cpu().int()).abs().float()
        assert differences.mean() <= 1
        assert differences.quantile(0.99) <= 6  # the border of the fill is in it


@pytest.mark.gpu
@EACH
def test_the_loader_gives_the_same_batches_on_a_gpu_and_on_a_cpu(decoder: Place, views: Made, folder: Index) -> None:
    """While other batches are decoded, and with chunks so small that memory which is freed early is reused."""
    made = batches(folder, "cuda:0", decoder=decoder, views=views, chunk=2, last=30)
    assert all(view.image.is_cuda and view.matrix.is_pinned() for batch in made for view in batch.views)
    assert all(view.image.is_contiguous(memory_format=torch.channels_last) for view in made[0].views)
    for ours, theirs in zip(made, batches(folder, "cpu", last=30), strict=True):
        assert_alike(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decoder", "views", "engines"),
    [("gpu", "gpu", 1.0), ("gpu", "gpu", 0.0), ("cpu", "gpu", 0.0), ("gpu", "dali", 1.0), ("gpu", "dali", 0.0)],
)
def test_views_under_a_busy_gpu_equal_those_at_rest(
    decoder: Place, views: Made, engines: float, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 50,000 views in each case: a kernel or a copy that runs too early would show."""
    monkeypatch.setattr("peclr_dali.pipelines.render.dali_graph._ENGINES_SHARE", engines)
    rng = np.random.default_rng(0)
    for number in range(512):
        (tmp_path / f"{number:03}.jpg").write_bytes(as_jpeg(smooth_image(rng, 224, 224)).tobytes())
    index, kinds = index_of(tmp_path), [Augmentation(GeometryConfig(side_px=64))] * 2
    work = torch.randn(4096, 4096, device="cuda")

    def pixels(busy: bool) -> list[torch.Tensor]:
        made = []
        where: dict[str, Any] = {"decoder": decoder, "views": views}
        with loader_of(index, kinds, batch=512, last=49, chunk=256, device="cuda:0", threads=8, **where) as loader:
            for batch in loader:
                for _ in range(40 if busy else 0):  # some tens of milliseconds, while later batches are made
                    torch.mm(work, work)
                made += [view.image.clone() for view in batch.views]
        return made

    different = total = 0
    for at_rest, under_load in zip(pixels(busy=False), pixels(busy=True), strict=True):
        different += int((at_rest != under_load).flatten(1).any(1).sum())
        total += len(at_rest)
    record("gpu_busy", decoder=decoder, views=views, engines=engines, compared=total, different=different)
    assert total > 50_000
    assert different == 0


@pytest.mark.gpu
@EACH
def test_a_consumer_on_a_side_stream_sees_whole_batches(decoder: Place, views: Made, folder: Index) -> None:
    keys = {"decoder": decoder, "views": views}
    expected = [batch.views[0].image.cpu() for batch in batches(folder, "cuda:0", **keys)]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for ours, theirs in zip(batches(folder, "cuda:0", **keys), expected, strict=True):
            assert torch.equal((ours.views[0].image + 0).cpu(), theirs)


@pytest.mark.gpu
@EACH
def test_a_loader_resumed_within_an_epoch_goes_on_with_the_same_bits(
    decoder: Place, views: Made, folder: Index
) -> None:
    whole, resumed = (batches(folder, "cuda:0", decoder=decoder, views=views, first=first) for first in (0, 4))
    assert_equal(resumed, whole[4:])


@pytest.mark.gpu
@EACH
def test_bad_files_are_replaced_and_no_other_sample_is_lost(
    decoder: Place, views: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index, bad_names = write_mixture(tmp_path, plain=120, others=24)
    order = EpochOrder(168, 168, seed=0)
    made = batches(index, "cuda:0", batch=56, order=order, chunk=14, decoder=decoder, views=views)
    assert_replaced(index, order, made, bad_names, caplog)
    for batch in made:
        centers = batch.views[0].image[:, :, 15:17, 15:17].float().mean((2, 3)).cpu()
        for sample, center in zip(batch.samples[:, 0].tolist(), centers, strict=True):
            kind = index.paths[sample].split("_")[0]
            if kind in COLOURS:
                np.testing.assert_allclose(center, COLOURS[kind], atol=6)


@pytest.mark.gpu
def test_views_of_a_cpu_feed_a_gpu(folder: Index) -> None:
    """Pixels stay in pinned memory until the step copies them."""
    made = batches(folder, "cuda:0", last=3, views="cpu", chunk=None)
    for ours, theirs in zip(made, batches(folder, "cpu", last=3), strict=True):
        assert ours.views[0].image.is_pinned()
        assert_alike(ours, theirs)


@pytest.mark.gpu
def test_the_array_may_change_while_the_gpu_is_busy() -> None:
    """Also when the pinned memory is freed and asked for again before the copies are made."""
    device = torch.device("cuda", 0)
    busy = torch.ones(4096, 4096, device=device)
    array, copies = np.empty(1 << 18, np.int64), []
    for _ in range(20):
        busy = busy @ busy * 1e-4
    for number in range(20):
        array[:] = number
        copies.append(to_device(array, device))
    assert [{copy.min().item(), copy.max().item()} for copy in copies] == [{number} for number in range(20)]

"""The GPU's kernel against the float64 oracle, with Triton's interpreter on the CPU; and that it compiles for GPUs.

What only a GPU can show is in test_gpu_views.py.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from peclr_dali.pipelines.arrays import BoolArray, FloatArray
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import ImageFile
from peclr_dali.pipelines.loader import loader
from peclr_dali.pipelines.render.renderers import make_renderer
from peclr_dali.pipelines.render.settings import choose_settings
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.plan import plan_views
from tests.pipelines import harness, reference
from tests.pipelines.harness import (
    NO_COLOUR,
    Image,
    assert_equal,
    draws_of,
    encode,
    index_of,
    load,
    settings_of,
    smooth_image,
)
from tests.pipelines.test_views import PLAIN_DRAW, near_hue_cut

KERNEL = "peclr_dali.pipelines.render.gpu_kernel"
Fill = int | Literal["edge"]
Jitter = Literal["none", "hsv"]

SIZES = [(1, 1), (1, 9), (13, 1), (2, 3), (37, 53), (45, 58), (83, 71), (90, 54)]
"""Heights and widths: a single pixel, rows, and odd numbers that stay odd or become odd when they are halved."""

MAGNIFICATIONS = [[1, 1, 1, 1, 0.8, 1.9, 1.0, 0.3], [0.7, 2, 0.6, 1.5, 1.5, 0.7, 1.6, 1.1]]
"""For each view, of each image; so it is halved 0 to 3 times."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """A second copy of the kernel's file, whose functions are interpreted. Other tests do not see it."""
    from triton import knobs
    from triton.runtime import interpreter

    spec: Any = importlib.util.find_spec(KERNEL)
    module: ModuleType = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        # Triton would patch its whole language again for every call of a function in the kernel.
        patch.setattr(interpreter.InterpretedFunction, "__call__", lambda self, *given: self.rewrite()(*given))
        patch.setattr(module, "_PIXELS_AT_ONCE", 1024)
        yield module


def views_of(
    kernel: ModuleType,
    images: Sequence[Image],
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometry: GeometryConfig,
    colour: ColourConfig,
    mirror: BoolArray | None = None,
) -> tuple[list[Image], set[int]]:
    """For each view (N, S, S, 3), in one launch; and how often images were halved."""
    sizes = np.array([image.shape[:2] for image in images])
    plan = plan_views(sizes, np.ones(len(images), np.int64), box_px, draws, [geometry] * len(draws), mirror=mirror)
    shape = (1 + len(images) + 1, geometry.side_px, geometry.side_px, 3)
    whole = [torch.full(shape, 99, dtype=torch.uint8) for _ in draws]
    outs = [one[1:-1] for one in whole]
    address = np.array([image.ctypes.data for image in images], np.int64)
    kernel.make_views(address, plan, [Augmentation(geometry, colour)] * len(draws), outs)
    assert all((one[[0, -1]] == 99).all() for one in whole)  # nothing is written beyond the views
    return [out.numpy() for out in outs], set(plan.halvings.ravel().tolist())


def oracle(
    image: Image, box_px: FloatArray, draws: FloatArray, geometry: GeometryConfig, colour: ColourConfig, mirror: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A view (S, S, 3) before it is rounded, and before its colours are jittered."""
    warped = reference.warp_view(image, box_px, draws, geometry, mirror=mirror)
    return np.clip(reference.jitter(warped, colour, draws), 0, 255), warped


@pytest.mark.parametrize(
    ("fill", "jitter", "antialias"),
    [(0, "hsv", True), (77, "hsv", True), ("edge", "none", True), (0, "none", False), ("edge", "hsv", False)],
)
def test_every_pixel_is_the_oracle_s(
    kernel: ModuleType, fill: Fill, jitter: Jitter, antialias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the border, within one level: images of all sizes in one launch, both views, mirrored, cropped."""
    if not antialias:  # then a view takes two programs, and the second has too much room
        monkeypatch.setattr(kernel, "_PIXELS_AT_ONCE", 512)
    rng = np.random.default_rng(0)
    geometry = GeometryConfig(side_px=24, fill=fill, antialias=antialias, crop_probability=0.4, flip_probability=0.4)
    colour = ColourConfig(jitter=jitter)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES[:4]]
    images += [smooth_image(rng, *size, sigma_px=1.5) for size in SIZES[4:]]
    boxes = np.array([[0, 0, 0]] * 4 + [[26, 18, 33], [20, 30, 40], [0, 0, 0], [20, 60, 64]], np.float32)
    augmentation, places = Augmentation(geometry, colour), np.arange(len(images))
    draws = [draws_of(augmentation, len(images), view=view, seed=3) for view in range(2)]
    for table, magnifications in zip(draws, MAGNIFICATIONS, strict=True):
        table[:, Draw.MAGNIFICATION] = magnifications
    mirror = places % 3 == 1
    made, halvings = views_of(kernel, images, boxes, draws, geometry, colour, mirror)

    assert {0, 1, 2, 3} <= halvings if antialias else halvings == {0}
    assert {bool(crop) for table in draws for crop in table[:, Draw.CROP]} == {False, True}
    for view, table in zip(made, draws, strict=True):
        for row, image in enumerate(images):
            expected, warped = oracle(image, boxes[row], table[row], geometry, colour, bool(mirror[row]))
            difference = np.abs(expected - view[row])
            if jitter == "hsv":
                cut = near_hue_cut(warped, margin=0.01) & (np.ptp(warped, axis=-1) > 0.5)
                assert cut.mean() < 0.02
                difference[cut] = 0
            assert difference.max() <= 1
            assert (difference > 0.52).mean() < 0.01  # nearly all are rounded alike


def test_the_jitter_is_exact_over_its_whole_range(kernel: ModuleType) -> None:
    """Flat colours in every direction, without a warp."""
    geometry, colour = GeometryConfig(side_px=32), ColourConfig()
    grid = np.stack(np.meshgrid(*[np.linspace(0, 255, 16)] * 3), axis=-1).reshape(4, 32, 32, 3).astype(np.uint8)
    values = [(0.5, 5), (1, 20), (0, 255), (3, 0)]
    factors = np.array(list(itertools.product([0, 0.01, 0.6, 1], [0, 0.3, 1], values)), dtype=object)
    draws = np.tile(PLAIN_DRAW, (len(factors), 1))
    draws[:, [Draw.HUE, Draw.SATURATION]] = factors[:, :2]
    draws[:, [Draw.VALUE_SCALE, Draw.VALUE_SHIFT]] = [value for _, _, value in factors]
    images = [grid[number % 4] for number in range(len(draws))]
    ((view,), _) = views_of(kernel, images, np.zeros((len(draws), 3), np.float32), [draws], geometry, colour)
    for image, draw, made in zip(images, draws, view, strict=True):
        assert np.abs(np.clip(reference.jitter(image.astype(float), colour, draw), 0, 255) - made).max() <= 0.51


@pytest.mark.parametrize("fill", [pytest.param(200, marks=pytest.mark.slow), "edge"])
def test_views_from_very_near_and_very_far(kernel: ModuleType, fill: Fill) -> None:
    """A pixel that fills the view, an image smaller than a pixel of it, and boxes that do not meet the image; and the
    last row and column of an image whose sides are odd after each of four halvings."""
    rng = np.random.default_rng(0)
    geometry = GeometryConfig(side_px=16, fill=fill)
    images = [smooth_image(rng, 21, 30, sigma_px=2)] * 8 + [smooth_image(rng, 129, 193, sigma_px=5)]
    boxes = np.array([[15, 11, 20]] * 5 + [[4000, -3000, 20], [-2000, 10, 1], [15, 11, 1e5], [150, 90, 16]], np.float32)
    draws = np.tile(PLAIN_DRAW, (len(boxes), 1))
    draws[:, Draw.MAGNIFICATION] = [1e-3, 0.02, 30, 500, 4000, 1, 10, 1, 1.3 / 16]
    draws[:, Draw.ANGLE_DEG] = [*rng.uniform(-180, 180, 8), 20]
    ((view,), halvings) = views_of(kernel, images, boxes, [draws], geometry, NO_COLOUR)
    assert halvings == {0, 3, 4}
    for row, made in enumerate(view):
        expected, _ = oracle(images[row], boxes[row], draws[row], geometry, NO_COLOUR, mirror=False)
        assert np.abs(expected - made).max() <= 1


def test_the_loader_runs_the_kernel(kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of the CPU's own kernel, within a level, in two sizes; then the further augmentations follow."""
    monkeypatch.setitem(sys.modules, KERNEL, kernel)
    rng = np.random.default_rng(0)
    for number in range(6):
        image = smooth_image(rng, 40 + 7 * number, 50, sigma_px=3)
        (tmp_path / f"{number}.png").write_bytes(encode(image).tobytes())
    appearance = AppearanceConfig(cut_out_probability=0.5, colour_drop_probability=0.5)
    augmentations = [Augmentation(GeometryConfig(side_px=side_px), NO_COLOUR, appearance) for side_px in (32, 16, 32)]

    def batches() -> list[Batch]:
        return load(index_of(tmp_path), augmentations, batch=6, last=2, chunk=4, views="cpu")

    expected = batches()
    monkeypatch.setattr(
        loader, "choose_settings", lambda *given, **more: replace(choose_settings(*given, **more), views="gpu")
    )
    assert_equal(batches(), expected, within=1, mean=0.2)


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("renderer", ["cpu", "gpu"])
def test_an_image_of_another_size_than_its_header_says_is_refused(
    renderer: Literal["cpu", "gpu"], more: int, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the kernel reads its memory."""
    monkeypatch.setitem(sys.modules, KERNEL, kernel)

    def check(data: Image) -> ImageFile:
        file = check_image(data)
        return file._replace(size_px=(file.size_px[0], file.size_px[1] + more))

    monkeypatch.setattr(harness, "check_image", check)
    images = [np.zeros((40, 50, 3), np.uint8)] * 2
    with pytest.raises(RuntimeError, match=rf"(?s)40 50\].* their headers say .*40 {50 + more}"):
        harness.make_views(
            renderer, images, np.zeros((2, 3), np.float32), [np.tile(PLAIN_DRAW, (2, 1))], GeometryConfig(side_px=8),
            NO_COLOUR,
        )  # fmt: skip


class Decoded(list[torch.Tensor]):
    """Stands for DALI's list of images on a GPU, or of the graph's views."""

    def shape(self) -> list[tuple[int, ...]]:
        return [tuple(image.shape) for image in self]

    def as_tensor(self) -> torch.Tensor:
        return torch.stack(self)


@pytest.mark.parametrize("views", ["gpu", "dali"])
def test_the_images_are_held_until_they_have_been_read(
    views: Literal["gpu", "dali"], kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: what is asked of the event, in which order. The wait leaves the core to others."""
    monkeypatch.setitem(sys.modules, KERNEL, kernel)
    event = Mock()
    make_views = kernel.make_views
    monkeypatch.setattr(kernel, "make_views", lambda *given: (event.kernel(), make_views(*given)))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event if blocking else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    geometry = GeometryConfig(side_px=8)
    plan = plan_views(
        np.array([[8, 8]]), np.ones(1, np.int64), np.zeros((1, 3), np.float32), [PLAIN_DRAW[None]], [geometry]
    )
    view = View(
        torch.zeros(1, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    )
    images = Decoded([torch.full((8, 8, 3), 50, dtype=torch.uint8)])
    held = weakref.ref(images)
    matrices = [Mock(as_tensor=lambda: plan.matrix[0])] * 2

    made = make_renderer(settings_of(1, device="gpu", views=views), [Augmentation(geometry, NO_COLOUR)])
    made.write((images, *matrices) if views == "dali" else (images,), plan, [view])
    del images
    gc.collect()
    assert event.mock_calls == [call.kernel()] * (views == "gpu") + [call.record()]
    assert held() is not None
    made.finish()
    assert event.mock_calls[-1] == call.synchronize()
    gc.collect()
    assert held() is None
    assert (view.image == 50).all()
    np.testing.assert_array_equal(view.matrix, plan.matrix[0])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Compiles the kernel as its launch with tables does, and gives the machine code's bytes on the stack too.

    Registers that do not fit are kept there, in the card's memory.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from peclr_dali.pipelines.render.gpu_kernel import _make_pixels, constants

    def compile_for(capability: int, fill: Fill, jitter: Jitter, **changed: Any) -> tuple[Any, int]:
        no_gpu = Mock()  # stands for the driver of a GPU, for what Triton asks it before it compiles
        no_gpu.get_current_device.return_value = no_gpu.get_current_stream.return_value = 0
        no_gpu.get_current_target.return_value = GPUTarget("cuda", capability, 32)
        monkeypatch.setattr(driver, "_active", no_gpu)
        _make_pixels.device_caches.clear()  # it asked another driver
        given = constants(Augmentation(GeometryConfig(fill=fill), ColourConfig(jitter=jitter)))
        kernel = _make_pixels.warmup(torch.int64, torch.float32, grid=(1,), **{**given, **changed})
        code = tmp_path / "kernel.cubin"
        code.write_bytes(kernel.asm["cubin"])
        described = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", code]
        report = subprocess.run(described, check=True, capture_output=True, text=True).stdout
        return kernel, int(re.findall(r"Function _make_pixels:\s.*STACK:(\d+)", report)[0])

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield compile_for
        _make_pixels.device_caches.clear()


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_the_kernel_compiles_for_gpus(capability: int, compiled: Callable[..., Any]) -> None:
    """To machine code for RTX 20, A100, RTX 30, RTX 40, H100, B200 and RTX 50 cards, which needs no GPU."""
    kinds: list[tuple[Fill, Jitter]] = [("edge", "hsv"), (0, "hsv"), (0, "none")]
    for fill, jitter in kinds if capability == 75 else kinds[:1]:
        kernel, stack_bytes = compiled(capability, fill, jitter)
        assert kernel.src.signature["places"] == "*i64"
        assert kernel.src.signature["numbers"] == "*fp32"
        assert set(list(kernel.src.signature.values())[2:]) == {"constexpr"}
        assert kernel.metadata.shared == kernel.metadata.global_scratch_size == 0
        assert stack_bytes <= 16

"""Ways to put images through a renderer or the loader."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali import Batch, DataConfig, Index, PipelinesConfig, View
from peclr_dali.pipelines.arrays import BoolArray, FloatArray
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.loader.prepare import Quarantine
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.renderers import make_renderer
from peclr_dali.pipelines.render.runner import run_chunks
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.samples.order import EpochOrder, Order, Schedule
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import Chunk, plan_views

Image = npt.NDArray[np.uint8]
RendererName = Literal["dali", "cpu"]
NO_APPEARANCE = AppearanceConfig()
NO_COLOUR = ColourConfig(jitter="none")
RENDERERS: tuple[RendererName, ...] = ("dali", "cpu")
SMALL = Augmentation(GeometryConfig(side_px=16))
SMALL_PLAIN = Augmentation(GeometryConfig(side_px=16), NO_COLOUR)


def encode(image: Image) -> Image:
    """RGB image -> the bytes of a PNG file."""
    return np.asarray(cv2.imencode(".png", image[..., ::-1])[1])


def jpeg(image: Image, *flags: int) -> bytes:
    """RGB image -> the bytes of a JPEG file, of quality 90 unless OpenCV's flags say otherwise."""
    return bytes(cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90, *flags])[1])


def smooth_image(rng: np.random.Generator, height: int, width: int, sigma_px: float = 4.0) -> Image:
    """Colourful blobs over the whole range of values."""
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    blurred = cv2.GaussianBlur(noise, (0, 0), sigma_px).astype(np.float32)
    low, high = blurred.min(), blurred.max()
    return np.asarray((blurred - low) * (255 / (high - low)), dtype=np.uint8)


def index_of(root: Path) -> Index:
    """The index of a folder's images."""
    return load_folder(DataConfig("folder", str(root)))


def write_jpegs(root: Path, count: int) -> Index:
    """A folder of small JPEG files."""
    rng = np.random.default_rng(0)
    for number in range(count):
        (root / f"{number:03}.jpg").write_bytes(jpeg(smooth_image(rng, 40, 56, 3)))
    return index_of(root)


def draws_of(augmentation: Augmentation, count: int, *, view: int = 0, seed: int = 1) -> FloatArray:
    """The draws of one view at the first places of an epoch."""
    return draw_view(augmentation, seed=seed, epoch=0, view=view, places=np.arange(count))


def settings_of(count: int, *, device: Literal["cpu", "gpu"] = "cpu", **changed: Any) -> Settings:
    """Settings for one chunk."""
    values: dict[str, Any] = {"decoder": device, "views": "dali", "device_id": 0 if device == "gpu" else None,
                              "threads": 1, "prefetch": 1}  # fmt: skip
    return Settings(chunk_size=count, **values | changed)


def plan_files(
    encoded: Sequence[Image | bytes],
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometry: GeometryConfig,
    mirror: BoolArray | None = None,
    *,
    regions: bool = False,
) -> Chunk:
    """The chunk of some files, planned as `plan_chunk` does."""
    files = [check_image(data) for data in encoded]
    plan = plan_views(
        np.array([file.size_px for file in files]),
        np.array([file.orientation for file in files]),
        box_px,
        draws,
        [geometry] * len(draws),
        mirror=mirror,
        croppable=np.array([file.is_jpeg for file in files]) if regions else None,
    )
    return Chunk(np.arange(len(files)), files=files, plan=plan)


def decode_chunk(chunk: Chunk, **changed: Any) -> Any:
    """DALI's list of the decoded images or regions; None if a file does not decode."""
    ((_, outputs),) = run_chunks(partial(decode_pipeline, settings_of(len(chunk.files), **changed)), iter([chunk]))
    return None if outputs is None else outputs[0]


def make_views(
    renderer: Literal["cpu", "gpu", "dali"],
    images: Sequence[Image],
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometry: GeometryConfig,
    colour: ColourConfig,
    *,
    mirror: BoolArray | None = None,
    device: Literal["cpu", "gpu"] = "cpu",
    encode: Callable[[Image], Image] = encode,
    appearance: AppearanceConfig = NO_APPEARANCE,
    regions: bool = False,
    **changed: Any,
) -> list[View]:
    """The views of some images, as one chunk through a renderer, one view per table of draws.

    `changed` are other `Settings`.
    """
    count, side = len(images), geometry.side_px
    settings = settings_of(count, device=device, views=renderer, threads=2, regions=regions, **changed)
    made = make_renderer(settings, [Augmentation(geometry, colour, appearance)] * len(draws))
    files = {key: encode(image) for key, image in {id(image): image for image in images}.items()}  # repeated ones once
    chunk = plan_files([files[id(image)] for image in images], box_px, draws, geometry, mirror, regions=regions)
    pixels = "cuda:0" if device == "gpu" else "cpu"
    views = [
        View(
            torch.empty(count, side, side, 3, dtype=torch.uint8, device=pixels).permute(0, 3, 1, 2),
            torch.empty(count, 2, 3),
            torch.empty(count, 2, 3),
        )
        for _ in draws
    ]
    ((_, outputs),) = run_chunks(made.build, iter([chunk]))
    assert outputs is not None
    made.write(outputs, chunk.plan, views)
    made.finish()
    made.close()
    return views


def loader_of(
    index: Index,
    augmentation: Augmentation | Sequence[Augmentation] = SMALL,
    *,
    batch: int = 20,
    rows: tuple[int, int] | None = None,
    order: Order | None = None,
    first: int = 0,
    last: int | None = 6,
    chunk: int | None = None,
    device: str = "cpu",
    quarantine: Quarantine | None = None,
    **config: Any,
) -> Loader:
    """A loader of some steps, or without an end.

    Args:
        rows: start and stop of this rank's rows; None: all.
        order: None: shuffled, of whole batches.
        chunk: `PipelinesConfig.batch`.
        config: its other keys.
    """
    order = EpochOrder(len(index), len(index) // batch * batch, seed=5) if order is None else order
    schedule = Schedule(order, batch, range(*rows or (0, batch)), first_step=first, last_step=last)
    pipelines = PipelinesConfig(**{"threads": 2, "batch": chunk, **config})
    return build_loader(index, schedule, pipelines, augmentation, device=torch.device(device), quarantine=quarantine)


def load(index: Index, augmentation: Augmentation | Sequence[Augmentation] = SMALL, **options: Any) -> list[Batch]:
    """All batches of `loader_of`."""
    with loader_of(index, augmentation, **options) as loader:
        return list(loader)


def join_ranks(ranks: Sequence[Sequence[Batch]]) -> list[Batch]:
    """What all ranks have received at each step, in the order of their rows."""
    return [
        Batch(
            tuple(
                View(*map(torch.cat, zip(*(vars(batch.views[number]).values() for batch in step), strict=True)))
                for number in range(2)
            ),
            torch.cat([batch.samples for batch in step]),
            torch.cat([batch.positions for batch in step]),
        )
        for step in zip(*ranks, strict=True)
    ]


def assert_equal(ours: Sequence[Batch], theirs: Sequence[Batch], *, within: int = 0, mean: float = math.inf) -> None:
    """The same batches; for `within` and `mean`, see `assert_equal_views`."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.samples, other.samples)
        assert torch.equal(one.bad, other.bad)
        assert_equal_views(one.views, other.views, within=within, mean=mean)


def assert_equal_views(ours: Sequence[View], theirs: Sequence[View], *, within: int, mean: float) -> None:
    """The same matrices; pixels may differ by `within` levels, and by less than `mean` on the average of a view."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.matrix, other.matrix)
        assert torch.equal(one.source_to_view_px, other.source_to_view_px)
        difference = (one.image.int() - other.image.int()).abs()
        assert difference.max() <= within
        assert difference.float().mean() < mean

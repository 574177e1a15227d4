"""Ways to put single images through a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch

from pipelines.arrays import BoolArray, FloatArray
from pipelines.batch import View
from pipelines.files.check import check_image
from pipelines.render.backends import make_renderer
from pipelines.render.dali_graph import GraphConfig
from pipelines.render.request import Request
from pipelines.render.runner import Runner
from pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from pipelines.views.plan import plan_views

Image = npt.NDArray[np.uint8]
NO_APPEARANCE = AppearanceConfig()
BACKENDS: tuple[Literal["dali", "cpu"], ...] = ("dali", "cpu")


def encode(image: Image) -> Image:
    """RGB image -> the bytes of a PNG file."""
    return np.asarray(cv2.imencode(".png", image[..., ::-1])[1])


def smooth_image(rng: np.random.Generator, height: int, width: int, sigma_px: float = 4.0) -> Image:
    """Colourful blobs over the whole range of values."""
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    blurred = cv2.GaussianBlur(noise, (0, 0), sigma_px).astype(np.float32)
    low, high = blurred.min(), blurred.max()
    return np.asarray((blurred - low) * (255 / (high - low)), dtype=np.uint8)


def plan_request(
    encoded: Sequence[Image],
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometry: GeometryConfig,
    mirror: BoolArray | None = None,
    *,
    regions: bool = False,
) -> Request:
    """The request for some files, planned as `RequestMaker` does."""
    files = [check_image(data) for data in encoded]
    plan = plan_views(
        np.array([file.size_px for file in files]),
        np.array([file.orientation for file in files]),
        box_px,
        draws,
        geometry,
        mirror=mirror,
        croppable=np.array([file.is_jpeg for file in files]) if regions else None,
    )
    return Request([file.encoded for file in files], plan)


def make_views(
    backend: Literal["dali", "cpu"],
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
    fused: bool = False,
) -> list[View]:
    """The views of some images, as one batch through a backend, one view per table of draws."""
    device_id = 0 if device == "gpu" else None
    graph = GraphConfig(
        device=device, device_id=device_id, batch=len(images), threads=2, prefetch=1, views=len(draws),
        regions=regions, fused=fused,
    )  # fmt: skip
    made = make_renderer(backend, graph, Augmentation(geometry, colour, appearance))
    request = plan_request([encode(image) for image in images], box_px, draws, geometry, mirror, regions=regions)
    count, side = len(images), geometry.side_px
    pixels = "cuda:0" if device == "gpu" else "cpu"
    views = [
        View(
            torch.empty(count, side, side, 3, dtype=torch.uint8, device=pixels).permute(0, 3, 1, 2),
            torch.empty(count, 2, 3),
            torch.empty(count, 2, 3),
        )
        for _ in draws
    ]
    made.write(next(Runner(made.build, iter([request]).__next__)), request.plan, views)()
    made.close()
    return views

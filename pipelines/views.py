"""The DALI graphs: encoded bytes -> views and their matrices.

`view_pipeline` runs every node, on a CPU or on a GPU; `decode_pipeline` stops at the decoded image and leaves the
pixels to `pipelines.fast_cpu`. Nothing in either graph is random: the draws come in as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import nvidia.dali.math as dali_math
import nvidia.dali.types as types
from nvidia.dali import Pipeline, fn

from pipelines import colour as colour_nodes
from pipelines.draws import ColourConfig, FloatArray, GeometryConfig
from pipelines.matrices import ViewMatrices, compose
from pipelines.reference import HALVINGS

Node = Any  # DALI's DataNode carries no types
Encoded = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """What one DALI batch of N samples is made from.

    Attributes:
        encoded: N files as they are on disk, each (bytes,) uint8; all have passed `pipelines.files.check_image`.
        box_px: (N, 3) canonical boxes, as in `pipelines.index.Index`.
        draws: per view, the (N, len(Draw)) table of draws.
    """

    encoded: Sequence[Encoded]
    box_px: FloatArray
    draws: Sequence[FloatArray]


@dataclass(frozen=True)
class GraphConfig:
    """What shapes the graph.

    Attributes:
        device: where the pixels are decoded and warped.
        device_id: the GPU, or None on a CPU-only machine.
        batch: largest number of samples in one request.
        threads: DALI's CPU threads.
        prefetch: requests under way at once.
        views: views per sample.
        hw_decoder_load: share of the images for the GPU's JPEG engines, where it has them.
    """

    device: Literal["cpu", "gpu"]
    device_id: int | None
    batch: int
    threads: int
    prefetch: int
    views: int
    hw_decoder_load: float = 0.65


def view_pipeline(
    config: GraphConfig, geometry: GeometryConfig, colour: ColourConfig, feed: Callable[[], Request]
) -> Pipeline:
    """Decode once, make every view.

    Outputs, per view: image (S, S, 3) uint8 on `config.device`, augmentation (2, 3) and source_to_view_px (2, 3)
    float32 on the CPU.
    """
    pipeline = _empty_pipeline(config)
    with pipeline:
        image, size_px, matrices, draws = _decoded(config, geometry, feed)
        outputs = []
        for view, view_draws in zip(matrices, draws, strict=True):
            source = image
            if geometry.antialias:
                source = _halved(image, size_px, view.minified_size_px)
            warped = fn.warp_affine(
                source,
                matrix=view.minified_to_view_px,
                inverse_map=False,
                size=[geometry.side_px, geometry.side_px],
                interp_type=types.INTERP_LINEAR,
                fill_value=None if geometry.fill == "edge" else geometry.fill,
                dtype=types.FLOAT,
            )
            jittered = colour_nodes.jitter(warped, colour, view_draws)
            outputs += [fn.cast(jittered, dtype=types.UINT8), view.augmentation, view.source_to_view_px]
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def decode_pipeline(config: GraphConfig, geometry: GeometryConfig, feed: Callable[[], Request]) -> Pipeline:
    """Decode and compose, leaving the pixels to the caller.

    Outputs: image (H, W, 3) uint8, then per view augmentation (2, 3), source_to_view_px (2, 3), minified_size_px (2,)
    and minified_to_view_px (2, 3) float32, all on the CPU.
    """
    pipeline = _empty_pipeline(config)
    with pipeline:
        image, _, matrices, _ = _decoded(config, geometry, feed)
        outputs = [image]
        for view in matrices:
            outputs += [view.augmentation, view.source_to_view_px, view.minified_size_px, view.minified_to_view_px]
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def _empty_pipeline(config: GraphConfig) -> Pipeline:
    return Pipeline(
        batch_size=config.batch,
        num_threads=config.threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
    )


def decode(encoded: Node, config: GraphConfig) -> Node:
    """Node of the decoded RGB image (H, W, 3) uint8, EXIF orientation applied."""
    return fn.decoders.image(
        encoded,
        device="mixed" if config.device == "gpu" else "cpu",
        output_type=types.RGB,
        hw_decoder_load=config.hw_decoder_load,
        jpeg_fancy_upsampling=True,  # as the CPU's decoder does always, so that both see the same colours
    )


def _decoded(
    config: GraphConfig, geometry: GeometryConfig, feed: Callable[[], Request]
) -> tuple[Node, Node, list[ViewMatrices], Sequence[Node]]:
    """Nodes of the decoded image, of its size, of every view's matrices and of its draws."""

    def source() -> tuple[Sequence[Encoded], FloatArray, *tuple[FloatArray, ...]]:
        request = feed()
        return (request.encoded, request.box_px, *request.draws)

    encoded, box_px, *draws = fn.external_source(
        source=source,
        num_outputs=2 + config.views,
        dtype=[types.UINT8] + [types.FLOAT] * (1 + config.views),
        ndim=[1] * (2 + config.views),
        batch=True,
        no_copy=True,
    )
    image = decode(encoded, config)
    # Asked of the header, not of the decoded image, so that the matrices are made on the CPU on every device.
    size_px = fn.cast(fn.peek_image_shape(encoded)[0:2], dtype=types.FLOAT)
    matrices = [
        compose(box_px, size_px, view_draws, side_px=geometry.side_px, antialias=geometry.antialias)
        for view_draws in draws
    ]
    return image, size_px, matrices, draws


def _halved(image: Node, size_px: Node, wanted_px: Node) -> Node:
    """Halve the image, each time the mean of 2 x 2 pixels, until it has the size that is wanted."""
    for _ in range(HALVINGS):
        half_px = dali_math.ceil(size_px / 2)
        halve = fn.cast(size_px > wanted_px, dtype=types.FLOAT)
        size_px = (1 - halve) * size_px + halve * half_px
        image = fn.resize(image, size=size_px, interp_type=types.INTERP_LINEAR, antialias=False)
    return image

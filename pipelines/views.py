"""The DALI graphs: encoded bytes -> views and their matrices.

`view_pipeline` runs every node, on a CPU or on a GPU; `decode_pipeline` stops at the decoded image and leaves the
pixels to `pipelines.fast_cpu`. Nothing in either graph is random: the draws come in as a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import nvidia.dali.types as types
from nvidia.dali import Pipeline, fn

from pipelines import appearance as appearance_nodes
from pipelines import colour as colour_nodes
from pipelines.draws import NO_APPEARANCE, AppearanceConfig, BoolArray, ColourConfig, FloatArray, GeometryConfig
from pipelines.matrices import compose
from pipelines.reference import MAX_HALVINGS
from pipelines.regions import Regions, whole_images

Node = Any  # DALI's DataNode carries no types
Encoded = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """What one DALI batch of N samples is made from.

    Attributes:
        encoded: N files as they are on disk, each (bytes,) uint8; all have passed `pipelines.files.check_image`.
        box_px: (N, 3) canonical boxes, as in `pipelines.index.Index`.
        draws: per view, the (N, len(Draw)) table of draws.
        mirror: (N,) whose canonical view is mirrored, as in `pipelines.index.Index`; None: nobody's.
        regions: which part of each image is decoded, if the graph decodes regions; None: all of them whole.
    """

    encoded: Sequence[Encoded]
    box_px: FloatArray
    draws: Sequence[FloatArray]
    mirror: BoolArray | None = None
    regions: Regions | None = None

    def whole(self) -> Request:
        """The same, with every image decoded whole."""
        return dataclasses.replace(self, regions=None)


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
        regions: decode only the regions that a request names.
    """

    device: Literal["cpu", "gpu"]
    device_id: int | None
    batch: int
    threads: int
    prefetch: int
    views: int
    hw_decoder_load: float = 0.65
    regions: bool = False


def view_pipeline(
    config: GraphConfig,
    geometry: GeometryConfig,
    colour: ColourConfig,
    feed: Callable[[], Request],
    appearance: AppearanceConfig = NO_APPEARANCE,
) -> Pipeline:
    """Decode once, make every view.

    Outputs, per view: image (S, S, 3) uint8 on `config.device`, augmentation (2, 3) and source_to_view_px (2, 3)
    float32 on the CPU.
    """

    def source() -> tuple[Any, ...]:
        request = feed()
        mirror = np.zeros(len(request.encoded), bool) if request.mirror is None else request.mirror
        regions = request.regions or whole_images(len(request.encoded))
        region_px = np.concatenate([regions.start_px, regions.shape_px], axis=1)
        fractions = regions.fractions() if config.regions else ()
        return (request.encoded, region_px, request.box_px, mirror, *request.draws, *fractions)

    def composed(
        boxes_px: list[FloatArray],
        mirrors: list[BoolArray],
        shapes: list[npt.NDArray[np.int64]],
        regions_px: list[npt.NDArray[np.int64]],
        draws: list[FloatArray],
    ) -> tuple[list[FloatArray], ...]:
        sizes_px, region_px = np.stack(shapes)[:, :2], np.stack(regions_px)
        start_px, shape_px = region_px[:, :2], region_px[:, 2:]
        matrices = compose(np.stack(boxes_px), sizes_px, np.stack(draws), geometry, np.stack(mirrors), start_px)
        decoded_px = np.where(shape_px > 0, shape_px, sizes_px)
        return (
            list(matrices.augmentation),
            list(matrices.source_to_view_px),
            list(matrices.minified_to_view_px),
            list(_halving_sizes(decoded_px, matrices.halvings)),
        )

    spared = 2 if config.regions else 0  # inputs that say what to decode
    pipeline = _empty_pipeline(config)
    with pipeline:
        fed: Sequence[Node] = fn.external_source(
            source=source,
            num_outputs=4 + config.views + spared,
            dtype=[types.UINT8, types.INT64, types.FLOAT, types.BOOL] + [types.FLOAT] * (config.views + spared),
            ndim=[1, 1, 1, 0] + [1] * (config.views + spared),
            batch=True,
            no_copy=True,
        )
        encoded, region_px, box_px, mirror, *tables = fed
        draws, fractions = tables[: config.views], tables[config.views :]
        image = decode(encoded, config, fractions)
        # Asked of the header, not of the decoded image, so that the matrices are made on the CPU on every device.
        shape = fn.peek_image_shape(encoded)
        outputs = []
        for view_draws in draws:
            nodes: Any = fn.python_function(  # typed as None, which it returns only without outputs
                box_px, mirror, shape, region_px, view_draws, function=composed, batch_processing=True, num_outputs=4
            )
            augmentation, source_to_view_px, minified_to_view_px, sizes_px = nodes
            halved = image
            for level in range(MAX_HALVINGS if geometry.antialias else 0):
                # Halving by bilinear sampling in the middle of four pixels is their mean.
                size = sizes_px[level]
                halved = fn.resize(
                    halved,
                    size=size,
                    roi_start=[0.0, 0.0],
                    roi_end=sizes_px[MAX_HALVINGS + level],
                    interp_type=types.INTERP_LINEAR,
                    antialias=False,
                )
            warped = fn.warp_affine(
                halved,
                matrix=minified_to_view_px,
                inverse_map=False,
                size=[geometry.side_px, geometry.side_px],
                interp_type=types.INTERP_LINEAR,
                fill_value=None if geometry.fill == "edge" else geometry.fill,
                dtype=types.FLOAT,
            )
            made = fn.cast(colour_nodes.jitter(warped, colour, view_draws), dtype=types.UINT8)
            if appearance.active:
                made = appearance_nodes.change_appearance(made, appearance, view_draws, geometry.side_px)
            outputs += [made, augmentation, source_to_view_px]
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def decode_pipeline(config: GraphConfig, feed: Callable[[], Request]) -> Pipeline:
    """Decode only. Output: image, or its region, (H, W, 3) uint8 on the CPU."""

    def source() -> tuple[Any, ...]:
        request = feed()
        regions = request.regions or whole_images(len(request.encoded))
        return (request.encoded, *(regions.fractions() if config.regions else ()))

    inputs = 3 if config.regions else 1
    pipeline = _empty_pipeline(config)
    with pipeline:
        encoded, *fractions = fn.external_source(
            source=source,
            num_outputs=inputs,
            dtype=[types.UINT8, types.FLOAT, types.FLOAT][:inputs],
            ndim=[1] * inputs,
            batch=True,
            no_copy=True,
        )
        pipeline.set_outputs(decode(encoded, config, fractions))
    pipeline.build()
    return pipeline


def decode(encoded: Node, config: GraphConfig, region: Sequence[Node] = ()) -> Node:
    """Node of the decoded RGB image (H, W, 3) uint8, EXIF orientation applied.

    Args:
        encoded: node of the files.
        config: where to decode.
        region: nodes of start and shape, (2,) each: row and column as fractions of the image's; none: all of it.
    """
    options = {
        "device": "mixed" if config.device == "gpu" else "cpu",
        "output_type": types.RGB,
        "hw_decoder_load": config.hw_decoder_load,
        "jpeg_fancy_upsampling": True,  # as the CPU's decoder does always, so that both see the same colours
    }
    if not region:
        return fn.decoders.image(encoded, **options)
    start, shape = region
    return fn.decoders.image_slice(encoded, rel_start=start, rel_shape=shape, axes=[0, 1], **options)


def _empty_pipeline(config: GraphConfig) -> Pipeline:
    return Pipeline(
        batch_size=config.batch,
        num_threads=config.threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
    )


def _halving_sizes(sizes_px: npt.NDArray[np.int64], halvings: npt.NDArray[np.int64]) -> FloatArray:
    """What each of the graph's halvings makes of N images: (N, 2 MAX_HALVINGS, 2) heights and widths.

    First the size after each, then the part of the size before that goes into it: all but an odd row or column. A
    halving that an image does not need takes all of it and keeps its size.
    """
    after, taken = [], []
    size = sizes_px
    for level in range(MAX_HALVINGS):
        needed = (halvings > level)[:, None]
        half = size // 2
        taken.append(np.where(needed, 2 * half, size))
        size = np.where(needed, half, size)
        after.append(size)
    return np.stack([*after, *taken], axis=1).astype(np.float32)

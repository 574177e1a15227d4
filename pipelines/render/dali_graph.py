"""The DALI graphs: from encoded bytes and the plan of their views to pixels.

`view_pipeline` runs every node, on a CPU or on a GPU. `decode_pipeline` stops at the decoded image; `cpu_views.py` or
`gpu_kernel.py` makes the views. Neither graph draws random numbers or computes matrices: the plan is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import nvidia.dali.types as types
from nvidia.dali import Pipeline, fn

from pipelines.arrays import FloatArray, IntArray
from pipelines.render.dali_colour import Node, jitter
from pipelines.render.request import Request
from pipelines.views.augmentation import Augmentation
from pipelines.views.plan import MAX_HALVINGS


@dataclass(frozen=True)
class GraphConfig:
    """Configuration of a DALI graph.

    Attributes:
        device: where the pixels are decoded and warped.
        device_id: the GPU, or None on a CPU-only machine.
        batch: largest number of samples in one request.
        threads: DALI's CPU threads.
        prefetch: requests in progress at once.
        hw_decoder_load: share of the images for the GPU's JPEG engines, if it has them.
        regions: decode the regions in the plan; if False, the plan has whole images only.
        fused: on a GPU: the graph only decodes, and one kernel makes the views.
        halvings: largest number of halvings of a view (`plan.most_halvings`); the graph has as many nodes for them.
    """

    device: Literal["cpu", "gpu"]
    device_id: int | None
    batch: int
    threads: int
    prefetch: int
    views: int
    hw_decoder_load: float = 0.65
    regions: bool = False
    fused: bool = False
    halvings: int = MAX_HALVINGS


def view_pipeline(config: GraphConfig, augmentation: Augmentation, next_request: Callable[[], Request]) -> Pipeline:
    """Decode once and make every view, without the augmentations of `views.appearance`.

    Outputs, per view: image (S, S, 3) uint8 on `config.device`, matrix (2, 3) and source_to_view_px (2, 3) float32 on
    the CPU.
    """
    geometry = augmentation.geometry
    halvings = config.halvings if geometry.antialias else 0
    pads = halvings > 0 and geometry.fill != "edge"
    # Inputs of each view; DALI warns about inputs that are not used.
    inputs = ["matrix", "source_to_view_px", "decoded_to_view_px"]
    if augmentation.colour.jitter != "none":
        inputs.append("draws")
    if halvings:
        inputs.append("sizes_px")
    shared = ["padded_px"] * pads + ["start_px", "shape_px"] * config.regions

    def source() -> tuple[Any, ...]:
        request = next_request()
        plan = request.plan
        needed = np.max([view.halvings for view in plan.views], axis=0)
        if needed.max() > halvings:
            raise RuntimeError(f"views need {needed.max()} halvings, the graph was built for {halvings}")
        padded_px = _padded_sizes_px(plan.shape_px, needed) if pads else plan.shape_px
        tables = [
            _halving_sizes_px(padded_px, view.halvings, halvings) if name == "sizes_px" else getattr(view, name)
            for view in plan.views
            for name in inputs
        ]
        others = {"padded_px": padded_px, "start_px": plan.start_px, "shape_px": plan.shape_px}
        return (request.encoded, *tables, *(others[name].astype(np.int32) for name in shared))

    kinds = [(types.UINT8, 1)]
    kinds += [(types.FLOAT, 1 if name == "draws" else 2) for name in inputs] * config.views
    kinds += [(types.INT32, 1) for _ in shared]
    pipeline = _empty_pipeline(config)
    with pipeline:
        encoded, *fed = _external(source, kinds)
        of_views, shared_nodes = fed[: len(inputs) * config.views], fed[len(inputs) * config.views :]
        of_image = dict(zip(shared, shared_nodes, strict=True))
        region = [of_image["start_px"], of_image["shape_px"]] if config.regions else []
        image = decode(encoded, config, region)
        if pads:
            image = _pad(image, of_image["padded_px"], geometry.fill)
        outputs = []
        for first in range(0, len(of_views), len(inputs)):
            view = dict(zip(inputs, of_views[first : first + len(inputs)], strict=True))
            made = _view(image, view, augmentation, halvings)
            outputs += [made, view["matrix"], view["source_to_view_px"]]
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def _view(image: Node, view: Mapping[str, Node], augmentation: Augmentation, halvings: int) -> Node:
    """A view of the image, (S, S, 3) uint8: halved, warped, and its colours jittered. `view` has its inputs by name."""
    geometry = augmentation.geometry
    warped = fn.warp_affine(
        _halve(image, view["sizes_px"], halvings) if halvings else image,
        matrix=view["decoded_to_view_px"],
        inverse_map=False,
        size=[geometry.side_px, geometry.side_px],
        interp_type=types.INTERP_LINEAR,
        fill_value=None if geometry.fill == "edge" else geometry.fill,
        dtype=types.FLOAT,
    )
    return fn.cast(jitter(warped, augmentation.colour, view.get("draws")), dtype=types.UINT8)


def decode_pipeline(config: GraphConfig, next_request: Callable[[], Request]) -> Pipeline:
    """Decode only. Output: image or its region (H, W, 3) uint8 on `config.device`."""

    def source() -> tuple[Any, ...]:
        request = next_request()
        region = (request.plan.start_px, request.plan.shape_px) if config.regions else ()
        return (request.encoded, *(array.astype(np.int32) for array in region))

    kinds = [(types.UINT8, 1)] + [(types.INT32, 1)] * (2 if config.regions else 0)
    pipeline = _empty_pipeline(config)
    with pipeline:
        encoded, *region = _external(source, kinds)
        pipeline.set_outputs(decode(encoded, config, region))
    pipeline.build()
    return pipeline


def _pad(image: Node, size_px: Node, fill: int | str) -> Node:
    """An odd last row or column is halved together with the fill beyond it."""
    return fn.pad(image, axes=[0, 1], shape=size_px, fill_value=fill)


def _halve(image: Node, sizes_px: Node, times: int) -> Node:
    """Halve to the sizes of `_halving_sizes_px`. Bilinear sampling in the middle of four pixels gives their mean.

    If the mean is halfway between two levels, DALI's CPU operator rounds to the even level in blocks of 16 columns.
    In the columns behind them it rounds up. So a part of an image may be rounded differently from the whole.
    """
    for level in range(times):
        image = fn.resize(
            image,
            size=sizes_px[level],
            roi_start=[0.0, 0.0],
            roi_end=sizes_px[times + level],  # beyond the border, an odd one is repeated
            interp_type=types.INTERP_LINEAR,
            antialias=False,
        )
    return image


def decode(encoded: Node, config: GraphConfig, region: Sequence[Node] = ()) -> Node:
    """Node of the decoded RGB image (H, W, 3) uint8 as stored: the Exif orientation is not applied.

    `region` are the nodes of start and shape, (2,) int32 each: row and column in stored pixels; empty: the whole image.
    """
    options = {
        "device": "mixed" if config.device == "gpu" else "cpu",
        "output_type": types.RGB,
        "hw_decoder_load": config.hw_decoder_load,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,  # the CPU's decoder always does this; so both give the same colours
    }
    if not region:
        return fn.decoders.image(encoded, **options)
    start, shape = region
    return fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1], **options)


def _empty_pipeline(config: GraphConfig) -> Pipeline:
    return Pipeline(
        batch_size=config.batch,
        num_threads=config.threads,
        device_id=config.device_id,
        prefetch_queue_depth=config.prefetch,
        exec_dynamic=True,  # reuses the memory of an output only when nothing in Python refers to it
    )


def _external(source: Callable[[], tuple[Any, ...]], kinds: Sequence[tuple[Any, int]]) -> Node:
    """Input nodes fed by `source`: one for each (type, dimensions)."""
    return fn.external_source(
        source=source,
        num_outputs=len(kinds),
        dtype=[kind for kind, _ in kinds],
        ndim=[dimensions for _, dimensions in kinds],
        batch=True,
        no_copy=True,
    )


def _padded_sizes_px(sizes_px: IntArray, halvings: IntArray) -> IntArray:
    """Heights and widths (N, 2), rounded up so that they can be halved `halvings` (N,) times without a remainder."""
    block_px = 2 ** halvings[:, None]
    return -(-sizes_px // block_px) * block_px


def _halving_sizes_px(sizes_px: IntArray, halvings: IntArray, times: int) -> FloatArray:
    """Sizes of N images in each of the graph's halvings: (N, 2 times, 2) heights and widths.

    For each halving: the size after it, and twice this size, which is the size before it. A halving that an image does
    not need keeps its size.
    """
    after, taken = [], []
    size = sizes_px
    for level in range(times):
        needed = (halvings > level)[:, None]
        half = -(-size // 2)
        taken.append(np.where(needed, 2 * half, size))
        size = np.where(needed, half, size)
        after.append(size)
    return np.stack([*after, *taken], axis=1).astype(np.float32)

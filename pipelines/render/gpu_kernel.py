"""Views "gpu": one Triton kernel halves, warps and jitters the views of a chunk, one launch for each size.

The kernel runs behind the DALI graph, not as a node of it (`fn.python_function`). A node would need the GIL in DALI's
threads, run on a stream of DALI, and write into memory of DALI, from which the views would be copied once more. Behind
the graph the kernel writes into the training batch, on the loader's stream. Streams and memory are right because:

1. `Pipeline.outputs()`, called without a stream, returns when the images are decoded. The kernel waits for nothing.
2. The images are held until the kernel has finished, which a CUDA event says (`renderers.GpuViews`). DALI's dynamic
   executor (`dali_graph.py` asks for it) reuses the memory of an output only when nothing in Python refers to it.

A halved image is never stored. A pixel of an image that was halved h times is the mean of 2^h x 2^h pixels, so a
bilinear sample of it is the mean of 4^h bilinear samples of the image itself. This needs no scratch memory, no second
launch, and no rounding between the halvings. A view shows a halved image at 0.7 to 1.4 times its size. So it reads each
visible pixel of the image 2 to 8 times, for every h. All but the first of these reads can come from caches.

This file imports Triton, so it is imported only where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.render.cpu_views import JITTER, view_to_source
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.plan import Plan

_PIXELS_AT_ONCE = 256  # pixels of a view that one program makes. Not tuned


def make_views(address: IntArray, plan: Plan, augmentations: Sequence[Augmentation], outs: list[Tensor]) -> None:
    """Start to make the V views of N rows, on the current stream: a launch for each size and colour jitter.

    Args:
        address: (M,) of the first bytes of RGB images (H, W, 3) uint8 on the device of `outs`, of the sizes in the
            plan, rows without gaps.
        outs: outputs; for each view (N, S, S, 3) uint8, contiguous.

    Raises:
        UserError: a view reaches too far from its source.
    """
    row, inverse = np.arange(plan.image.shape[1]), view_to_source(plan.decoded_to_view_px)
    launches: dict[tuple[tuple[str, Any], ...], list[int]] = {}  # constants -> the views that have them
    for view, augmentation in enumerate(augmentations):
        launches.setdefault(tuple(constants(augmentation).items()), []).append(view)
    for same, views in launches.items():
        given = dict(same)
        places, numbers = [], []
        for view in views:
            to_address = outs[view].data_ptr() + 3 * given["side"] ** 2 * row
            image = plan.image[view]
            places.append(np.column_stack([address[image], plan.shape_px[image], plan.halvings[view], to_address]))
            numbers.append(np.column_stack([inverse[view], plan.draws[view][:, JITTER]]))
        programs = len(views) * len(row) * triton.cdiv(given["side"] ** 2, _PIXELS_AT_ONCE)
        with torch.cuda.device_of(outs[0]):  # type: ignore[no-untyped-call]
            tables = (to_device(np.concatenate(table), outs[0].device) for table in (places, numbers))
            _make_pixels[(programs,)](*tables, **given)


def constants(augmentation: Augmentation) -> dict[str, Any]:
    """Arguments that Triton compiles into the kernel as constants."""
    fill = augmentation.geometry.fill
    return {
        "side": augmentation.geometry.side_px,
        "jitter": augmentation.colour.jitter,
        "edge": fill == "edge",
        "fill": 0 if fill == "edge" else fill,
        "pixels": _PIXELS_AT_ONCE,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _make_pixels(
    places: tl.tensor,
    numbers: tl.tensor,
    side: tl.constexpr,
    jitter: tl.constexpr,
    edge: tl.constexpr,
    fill: tl.constexpr,
    pixels: tl.constexpr,
) -> None:
    """Make some pixels of one view.

    Args:
        places: (V N, 5) int64: address of the image, its height and width, number of halvings, address of the view.
        numbers: (V N, 10) float32: a row-major 2 x 3 matrix from view pixels to pixels of the halved image, as
            `cpu_views.view_to_source` gives it, with a border of one pixel; then the draws of `cpu_views.JITTER`.
    """
    programs_of_view: tl.constexpr = (side * side + pixels - 1) // pixels
    number = tl.program_id(0) // programs_of_view
    places += 5 * number
    numbers += 10 * number
    image = tl.load(places).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(places + 1).to(tl.int32), tl.load(places + 2).to(tl.int32)
    halvings = tl.load(places + 3).to(tl.int32)
    view = tl.load(places + 4).to(tl.pointer_type(tl.uint8))

    pixel = tl.program_id(0) % programs_of_view * pixels + tl.arange(0, pixels)
    x, y = (pixel % side).to(tl.float32), (pixel // side).to(tl.float32)
    source_x = tl.load(numbers) * x + (tl.load(numbers + 1) * y + tl.load(numbers + 2))
    source_y = tl.load(numbers + 3) * x + (tl.load(numbers + 4) * y + tl.load(numbers + 5))
    # Beyond the border of one pixel there is only border. The bounds also keep the numbers within int32.
    last_row, last_column = (height - 1) >> halvings, (width - 1) >> halvings
    source_x = tl.minimum(tl.maximum(source_x, 0.0), (last_column + 2).to(tl.float32))
    source_y = tl.minimum(tl.maximum(source_y, 0.0), (last_row + 2).to(tl.float32))
    left, upper = source_x.to(tl.int32), source_y.to(tl.int32)
    across, down = source_x - left.to(tl.float32), source_y - upper.to(tl.float32)
    lower_right = across * down
    upper_right, lower_left = across - lower_right, down - lower_right
    upper_left = 1.0 - across - lower_left
    left, upper, right, lower = left - 1, upper - 1, left, upper  # now without the border
    if edge:
        left, right = _within(left, last_column), _within(right, last_column)
        upper, lower = _within(upper, last_row), _within(lower, last_row)

    red = tl.full([pixels], 0.0, tl.float32)
    green, blue = red, red
    # All pixels of the square that halving makes one pixel of. Triton's interpreter takes no tensor for `range`.
    down_px = 0
    while down_px < 1 << halvings:
        upper_px, lower_px = (upper << halvings) + down_px, (lower << halvings) + down_px
        if edge:
            less_px = _beyond_edge(down_px, height, halvings)
            upper_px -= tl.where(upper == last_row, less_px, 0)
            lower_px -= tl.where(lower == last_row, less_px, 0)
        in_upper, in_lower = (upper_px >= 0) & (upper_px < height), (lower_px >= 0) & (lower_px < height)
        upper_at, lower_at = 3 * width * upper_px, 3 * width * lower_px
        across_px = 0
        while across_px < 1 << halvings:
            left_px, right_px = (left << halvings) + across_px, (right << halvings) + across_px
            if edge:
                less_px = _beyond_edge(across_px, width, halvings)
                left_px -= tl.where(left == last_column, less_px, 0)
                right_px -= tl.where(right == last_column, less_px, 0)
            in_left, in_right = (left_px >= 0) & (left_px < width), (right_px >= 0) & (right_px < width)
            left_at, right_at = 3 * left_px, 3 * right_px
            red, green, blue = _add(
                red, green, blue, upper_left, image + (upper_at + left_at), in_upper & in_left, fill
            )
            red, green, blue = _add(
                red, green, blue, upper_right, image + (upper_at + right_at), in_upper & in_right, fill
            )
            red, green, blue = _add(
                red, green, blue, lower_left, image + (lower_at + left_at), in_lower & in_left, fill
            )
            red, green, blue = _add(
                red, green, blue, lower_right, image + (lower_at + right_at), in_lower & in_right, fill
            )
            across_px += 1
        down_px += 1
    share = 1.0 / (1 << (2 * halvings)).to(tl.float32)
    red, green, blue = red * share, green * share, blue * share
    if jitter == "hsv":
        red, green, blue = _jitter_hsv(red, green, blue, numbers + 6)
    view += 3 * pixel
    wanted = pixel < side * side
    tl.store(view, _rounded(red), mask=wanted)
    tl.store(view + 1, _rounded(green), mask=wanted)
    tl.store(view + 2, _rounded(blue), mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _within(at: tl.tensor, last: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(at, 0), last)


@triton.jit  # type: ignore[untyped-decorator]
def _beyond_edge(at: tl.tensor, size: tl.tensor, halvings: tl.tensor) -> tl.tensor:
    """Number of pixels to go back from `at`, if it lies beyond the image and the edge is repeated before each halving.

    A square of 2^halvings pixels becomes one pixel. `at` counts from the first pixel of the last square; `size` is the
    image's side. A halving averages pixels in pairs. If the second of a pair is outside, the first is taken twice: `at`
    goes back to it. The loop runs from the last halving to the first.
    """
    last = (size - 1) & ((1 << halvings) - 1)
    less = at * 0
    level = halvings - 1
    while level >= 0:
        less += tl.where(((at - less) >> level) > (last >> level), 1 << level, 0)
        level -= 1
    return less


@triton.jit  # type: ignore[untyped-decorator]
def _add(
    red: tl.tensor,
    green: tl.tensor,
    blue: tl.tensor,
    weight: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    fill: tl.constexpr,
) -> tl.tuple:
    """Add the weighted pixels at some addresses to three colours. Outside the image, pixels are `fill`."""
    red += weight * tl.load(at, mask=inside, other=fill).to(tl.float32)
    green += weight * tl.load(at + 1, mask=inside, other=fill).to(tl.float32)
    blue += weight * tl.load(at + 2, mask=inside, other=fill).to(tl.float32)
    return red, green, blue


@triton.jit  # type: ignore[untyped-decorator]
def _jitter_hsv(red: tl.tensor, green: tl.tensor, blue: tl.tensor, numbers: tl.tensor) -> tl.tuple:
    """Scale hue and saturation, map value to a x + b: the arithmetic of `cpu_kernels._make_view`."""
    hue, saturation = tl.load(numbers), tl.load(numbers + 1)
    value = tl.maximum(red, tl.maximum(green, blue))
    chroma = value - tl.minimum(red, tl.minimum(green, blue))
    is_red, is_green = red >= value, green >= value
    difference = tl.where(is_red, green - blue, tl.where(is_green, blue - red, red - green))
    offset = tl.where(is_red, tl.where(green >= blue, 0.0, 6.0), tl.where(is_green, 2.0, 4.0))
    sixths = (difference / tl.maximum(chroma, 1e-6) + offset) * hue
    new_value = tl.minimum(tl.maximum(value * tl.load(numbers + 2) + tl.load(numbers + 3), 0.0), 255.0)
    new_chroma = new_value * saturation * (chroma / tl.maximum(value, 1e-6))
    return (
        _channel(new_value, new_chroma, sixths + 5.0),
        _channel(new_value, new_chroma, sixths + 3.0),
        _channel(new_value, new_chroma, sixths + 1.0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _channel(value: tl.tensor, chroma: tl.tensor, k: tl.tensor) -> tl.tensor:
    k = tl.where(k >= 6.0, k - 6.0, k)
    return value - chroma * tl.maximum(tl.minimum(tl.minimum(k, 4.0 - k), 1.0), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(colour: tl.tensor) -> tl.tensor:
    return (tl.minimum(tl.maximum(colour, 0.0), 255.0) + 0.5).to(tl.int32).to(tl.uint8)

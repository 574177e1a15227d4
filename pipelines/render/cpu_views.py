"""Makes views of decoded images on a CPU: runs the kernel of `cpu_kernels` in a pool of threads (views "cpu")."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import FloatArray, IntArray
from peclr_dali.pipelines.render.appearance_cpu import change_views
from peclr_dali.pipelines.render.cpu_kernels import make_views
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.plan import Plan

JITTER = [Draw.HUE, Draw.SATURATION, Draw.VALUE_SCALE, Draw.VALUE_SHIFT]
"""The draws of the colour jitter, in the order in which both kernels take them."""

_REACH_PX = 2**24  # largest coordinate at which float32 resolves one pixel


def view_to_source(decoded_to_view_px: FloatArray) -> FloatArray:
    """Invert matrices (..., 2, 3), corner-based on both sides, into the form that the kernel takes, (..., 6).

    Raises:
        UserError: a matrix is singular, or a view reaches too far from its source.
    """
    try:
        with np.errstate(all="ignore"):  # an overflow is refused below
            linear = np.linalg.inv(decoded_to_view_px[..., :2].astype(np.float64))
            offset = -np.einsum("...ij,...j->...i", linear, decoded_to_view_px[..., 2])
            # Corner-based to centre-based: half a pixel in the view; in the source it cancels against the border of one
            # pixel, which leaves the other half.
            offset += linear.sum(axis=-1) / 2 + 0.5
        inverse = np.concatenate([linear, offset[..., None]], axis=-1)
        bounded = bool((np.abs(inverse) < _REACH_PX).all())
    except np.linalg.LinAlgError:  # a matrix is singular
        bounded = False
    if not bounded:  # with NaN the kernel would read anywhere in memory
        raise UserError(
            f"a view reaches further than {_REACH_PX} pixels from its image, or is a single point: "
            "geometry.scale, data.box_margin or a box has an impossible value. Change it"
        )
    return inverse.reshape(*inverse.shape[:-2], 6).astype(np.float32)


def start_views(
    pool: ThreadPoolExecutor,
    threads: int,
    address: IntArray,
    images: Any,
    plan: Plan,
    augmentations: Sequence[Augmentation],
    outs: list[Tensor],
) -> list[Future[None]]:
    """Start to make the V views of N rows from M decoded images.

    Args:
        threads: how many of the pool's threads share the work, each with some of the images.
        address: (M,) of the first bytes of RGB images (H, W, 3) uint8, of the sizes in the plan, rows without gaps.
        images: holds their memory.
        outs: outputs; for each view (N, S, S, 3) uint8, contiguous.

    Returns:
        Futures. Wait for them before the views are read and before `images` is freed.
    """
    fill = augmentations[0].geometry.fill  # that of all views
    rows = np.full((len(outs), len(address)), -1)  # of each view, the row that shows an image
    np.put_along_axis(rows, plan.image, np.arange(plan.image.shape[1])[None], axis=1)
    arguments = (
        address,
        plan.shape_px,
        rows,
        plan.halvings,
        view_to_source(plan.decoded_to_view_px),
        np.array([one.colour.jitter == "hsv" for one in augmentations]),
        np.ascontiguousarray(plan.draws[:, :, JITTER]),
        0 if fill == "edge" else fill,
        fill == "edge",
        np.array([one.geometry.side_px for one in augmentations], np.int64),
        np.array([out.data_ptr() for out in outs], np.int64),
    )
    return [
        pool.submit(_make_share, arguments, first, threads, images, rows, augmentations, plan.draws, outs)
        for first in range(threads)
    ]


def _make_share(
    arguments: tuple[Any, ...],
    first: int,
    threads: int,
    images: Any,
    rows: IntArray,
    augmentations: Sequence[Augmentation],
    draws: FloatArray,
    outs: list[Tensor],
) -> None:
    """Make the views of a thread's images. `images` is held until then, since the arguments point to its memory."""
    make_views(*(*arguments, first, threads))
    for view_rows, augmentation, view_draws, out in zip(rows, augmentations, draws, outs, strict=True):
        shown = view_rows[first::threads]
        change_views(out.numpy(), shown[shown >= 0], view_draws, augmentation.appearance)

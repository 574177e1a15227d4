"""Peers with torchvision: v2 transforms in DataLoader's workers; decode_jpeg and grid_sample on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_image, decode_jpeg, read_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from peclr_dali.bench.peers.workers import Draws, Files, draw, endless_batches, shared_views, source_to_view_px


def batches(files: Files, threads: int, batch: int, device: str = "cuda") -> Iterator[tuple[Tensor, ...]]:
    """Endless batches of two views, (N, 3, S, S) uint8 on the device. The next batch's files are read meanwhile.

    The Exif orientation is not applied: torchvision does not offer it on a GPU.
    """
    order = endless_batches(len(files.paths), batch)
    with ThreadPoolExecutor(threads) as pool:

        def read(samples: Sequence[int]) -> tuple[Sequence[int], Iterator[Tensor]]:
            return samples, pool.map(read_file, [files.paths[sample] for sample in samples])

        following = read(next(order))
        while True:
            (samples, encoded), following = following, read(next(order))
            images = decode_jpeg(list(encoded), ImageReadMode.RGB, device=device)
            yield make_views(images, files.boxes_px[samples], draw(2, batch), files.side_px).unbind()


def make_views(images: Sequence[Tensor], boxes_px: Any, draws: Draws, view_px: int) -> Any:
    """(2, N, 3, S, S) uint8 views of N decoded images (3, H, W) uint8, on their device; draws are (2, N).

    Images of one size are sampled together.
    """
    device, shapes = images[0].device, np.array([image.shape[1:] for image in images])
    matrices_px = source_to_view_px(boxes_px, draws, view_px)
    matrices = torch.from_numpy(grid_matrices(matrices_px, shapes, view_px)).to(device)
    views = torch.empty((2, len(images), 3, view_px, view_px), device=device)
    for shape in np.unique(shapes, axis=0):
        rows = np.flatnonzero((shapes == shape).all(axis=1)).tolist()
        same = torch.stack([images[row] for row in rows]).float()
        for view in range(2):
            grid = F.affine_grid(matrices[view, rows], [len(rows), 3, view_px, view_px], align_corners=False)
            views[view, rows] = F.grid_sample(same, grid, align_corners=False)
    factors = Draws(*torch.from_numpy(np.array(draws, np.float32)).to(device)[..., None, None])
    return (255 * jitter_hsv(views / 255, factors)).round_().to(torch.uint8)


def grid_matrices(matrices_px: Any, shapes_px: Any, view_px: int) -> Any:
    """(..., N, 2, 3) float32 for `affine_grid`, which maps from view to source, both from -1 to 1.

    Args:
        matrices_px: (..., N, 2, 3) from source to view in pixels, corner-based.
        shapes_px: (N, 2) heights and widths of the sources.
    """
    per_px, linear = 2 / shapes_px[:, ::-1, None], np.linalg.inv(matrices_px[..., :2])
    center_px = linear @ (view_px / 2 - matrices_px[..., 2:])
    return np.concatenate([linear * (view_px / 2) * per_px, center_px * per_px - 1], axis=-1).astype(np.float32)


def jitter_hsv(rgb: Tensor, factors: Draws) -> Any:
    """Scale hue and saturation and map the value of (..., 3, H, W) RGB from 0 to 1; factors are (..., 1, 1)."""
    (red, green, blue), value, least = rgb.unbind(-3), rgb.amax(-3), rgb.amin(-3)
    chroma = (value - least).clamp_min(1e-6)
    after_green = torch.where(value == green, (blue - red) / chroma + 2, (red - green) / chroma + 4)
    hue = torch.where(value == red, (green - blue) / chroma % 6, after_green) * factors.hue
    saturation = (value - least) / value.clamp_min(1e-6) * factors.saturation
    value = (value * factors.value + factors.value_shift).clamp_max(1)
    sectors = torch.stack([(hue + number) % 6 for number in (5, 3, 1)], dim=-3)
    share = torch.minimum(sectors, 4 - sectors).clamp(0, 1)
    return value.unsqueeze(-3) * (1 - saturation.unsqueeze(-3) * share)


def make_batch(files: Files, samples: Sequence[int]) -> Tensor:
    """(2, N, 3, S, S) uint8 views, channels-last, in shared memory: the box resized once, then augmented."""
    draws, view_px = draw(2, len(samples)), files.side_px
    views = shared_views(len(samples), view_px).permute(0, 1, 4, 2, 3)
    for number, sample in enumerate(samples):
        source = decode_image(files.paths[sample], ImageReadMode.RGB, apply_exif_orientation=True)
        x_px, y_px, side_px = files.boxes_px[sample].tolist()
        side, corner = max(round(side_px), 1), (round(y_px - side_px / 2), round(x_px - side_px / 2))
        hand = functional.resized_crop(source, *corner, side, side, [view_px, view_px], antialias=True)
        for view in range(2):
            views[view, number] = _augment(hand, draws.at(view, number))
    return views


def _augment(hand: Tensor, one: Draws) -> Any:
    shift_px = [one.x_frac * hand.shape[-1], one.y_frac * hand.shape[-1]]
    way = InterpolationMode.BILINEAR
    view = functional.affine(hand, one.rotation_deg, shift_px, one.scale, shear=[0.0, 0.0], interpolation=way)
    view = functional.adjust_hue(functional.adjust_saturation(view, one.saturation), one.hue / 2)
    return functional.adjust_brightness(view, one.value)

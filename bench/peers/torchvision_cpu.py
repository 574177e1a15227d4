"""A peer with torchvision's decoder and its functional transforms of v2, in DataLoader's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from peclr_dali.bench.peers.workers import VIEW_PX, Draws, Files, draw, shared_views


def make_batch(files: Files, samples: Sequence[int]) -> Tensor:
    """(2, N, 3, 128, 128) uint8 views, channels-last, in shared memory: the box resized once, then augmented."""
    draws, views = draw(2, len(samples)), shared_views(len(samples)).permute(0, 1, 4, 2, 3)
    for number, sample in enumerate(samples):
        source = decode_image(files.paths[sample], ImageReadMode.RGB, apply_exif_orientation=True)
        x_px, y_px, side_px = files.boxes_px[sample].tolist()
        side, corner = max(round(side_px), 1), (round(y_px - side_px / 2), round(x_px - side_px / 2))
        hand = functional.resized_crop(source, *corner, side, side, [VIEW_PX, VIEW_PX], antialias=True)
        for view in range(2):
            views[view, number] = _augment(hand, draws.at(view, number))
    return views


def _augment(hand: Tensor, one: Draws) -> Any:
    shift_px = [one.x_frac * VIEW_PX, one.y_frac * VIEW_PX]
    way = InterpolationMode.BILINEAR
    view = functional.affine(hand, one.rotation_deg, shift_px, one.scale, shear=[0.0, 0.0], interpolation=way)
    view = functional.adjust_hue(functional.adjust_saturation(view, one.saturation), one.hue / 2)
    return functional.adjust_brightness(view, one.value)

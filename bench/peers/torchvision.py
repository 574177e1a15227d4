"""A peer with torchvision: v2 transforms in DataLoader's workers."""

from collections.abc import Sequence

from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from peclr_dali.bench.peers.workers import Files, draw, shared_views


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
            drawn = draws.at(view, number)
            turn = (drawn.rotation_deg, [drawn.x_frac * view_px, drawn.y_frac * view_px], drawn.scale, [0.0, 0.0])
            shown = functional.affine(hand, *turn, interpolation=InterpolationMode.BILINEAR)
            shown = functional.adjust_hue(functional.adjust_saturation(shown, drawn.saturation), drawn.hue / 2)
            views[view, number] = functional.adjust_brightness(shown, drawn.value)
    return views

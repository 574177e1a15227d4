"""A peer that uses torchvision's decoder and its functional transforms of v2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from peclr_dali.bench.loaders.peers.paper_draws import VIEW_PX, PeerDraw, whole_image_px
from peclr_dali.bench.loaders.peers.workers import ViewsOfFiles


class TorchvisionViews(ViewsOfFiles):
    """Views by torchvision's decoder and the functional transforms of v2, on uint8."""

    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[PeerDraw, PeerDraw], out: Tensor) -> None:
        """Decode, resize the box once, then apply affine map and colour for each view at its size."""
        source = decode_image(path, ImageReadMode.RGB, apply_exif_orientation=True)
        for view, made in zip(out, torchvision_views(source, box_px, draws), strict=True):
            view.copy_(made.permute(1, 2, 0))


def torchvision_views(source: Tensor, box_px: Sequence[float], draws: Sequence[PeerDraw]) -> Iterator[Tensor]:
    """A view (3, 128, 128) uint8 for each draw of a source (3, H, W) uint8, on the source's device."""
    x_px, y_px, side_px = box_px if box_px[2] else whole_image_px(source.shape[2], source.shape[1])
    side = max(round(side_px), 1)
    corner = round(y_px - side / 2), round(x_px - side / 2)
    hand = functional.resized_crop(source, *corner, side, side, [VIEW_PX, VIEW_PX], antialias=True)
    for one in draws:
        image = functional.affine(
            hand,
            angle=one.rotation_deg,
            translate=[one.x_frac * VIEW_PX, one.y_frac * VIEW_PX],
            scale=one.scale,
            shear=[0.0, 0.0],
            interpolation=InterpolationMode.BILINEAR,
        )
        image = functional.adjust_saturation(image, one.saturation)
        image = functional.adjust_hue(image, one.hue / 2)
        yield functional.adjust_brightness(image, one.value)

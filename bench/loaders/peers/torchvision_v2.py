"""Peers that use torchvision's decoder and its functional transforms of v2, on a CPU or a GPU.

Without a GPU, the GPU's peers run on the CPU, only for the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image, decode_jpeg
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from bench.loaders.peers.paper_draws import VIEW_PX, BoxArray, PeerDraw, draw, endless_batches, whole_image_px
from bench.loaders.peers.workers import ViewsOfFiles
from errors import UserError

_BATCHES_AHEAD: Final = 3


class TorchvisionViews(ViewsOfFiles):
    """Views by torchvision's decoder and the functional transforms of v2, on uint8."""

    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[PeerDraw, PeerDraw], out: Tensor) -> None:
        """Decode, resize the box once, then apply affine map and colour for each view at its size."""
        source = decode_image(path, ImageReadMode.RGB, apply_exif_orientation=True)
        for view, made in zip(out, torchvision_views(source, box_px, draws), strict=True):
            view.copy_(made.permute(1, 2, 0))


def torchvision_views(source: Tensor, box_px: Sequence[float], draws: Sequence[PeerDraw]) -> Iterator[Tensor]:
    """A view (3, 128, 128) uint8 for each draw of a source (3, H, W) uint8, on the source's device."""
    hand = torchvision_crop(source, box_px)
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


def torchvision_crop(source: Tensor, box_px: Sequence[float]) -> Tensor:
    """The box (3, 128, 128) of a source (3, H, W), black beyond it."""
    x_px, y_px, side_px = box_px if box_px[2] else whole_image_px(source.shape[2], source.shape[1])
    side = max(round(side_px), 1)
    corner = round(y_px - side / 2), round(x_px - side / 2)
    crop: Tensor = functional.resized_crop(source, *corner, side, side, [VIEW_PX, VIEW_PX], antialias=True)
    return crop


def batches_on_gpu(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of views, (2, N, 3, 128, 128) uint8, made image by image, since v2 draws only once for a
    batch.
    """
    rng = np.random.default_rng()
    for sources, boxes in decoded(paths, boxes_px, threads, batch):
        draws = draw(2 * batch, rng)
        pairs = zip(draws[::2], draws[1::2], strict=True)
        made = [torch.stack([*torchvision_views(*one)]) for one in zip(sources, boxes, pairs, strict=True)]
        yield torch.stack(made, dim=1)


def decoded(
    paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int
) -> Iterator[tuple[list[Tensor], list[list[float]]]]:
    """Endless batches of sources, each (3, H, W) uint8 on the GPU if there is one, and their boxes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = endless_batches(len(paths), batch)
    with ThreadPoolExecutor(threads) as readers:

        def start(samples: list[int]) -> tuple[list[int], Iterator[Tensor]]:
            return samples, readers.map(_read, [paths[sample] for sample in samples])

        ahead = deque(start(samples) for samples in islice(batches, _BATCHES_AHEAD))
        while True:
            samples, files = ahead.popleft()
            try:
                sources = decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device)
            except RuntimeError as error:
                raise UserError(
                    f"torchvision's decoder of JPEGs: {str(error).splitlines()[0]}. Use a source of JPEG files, or "
                    "leave other loaders out with --no-peers"
                ) from error
            ahead.append(start(next(batches)))
            yield sources, boxes_px[samples].tolist()


def _read(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))

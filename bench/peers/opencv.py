"""Peers with OpenCV: with the steps and tools of PeCLR's authors, and tuned."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import Compose, Normalize, ToTensor

from peclr_dali.bench.peers.workers import Draws, Files, draw, shared_views, source_to_view_px
from peclr_dali.pipelines.arrays import DoubleArray


def make_batch(files: Files, samples: Sequence[int]) -> Tensor:
    """(2, N, 3, S, S) uint8 views, channels-last, in shared memory."""
    side_px, draws = files.side_px, draw(2, len(samples))
    views = shared_views(len(samples), side_px)
    matrices = opencv_matrices(files.boxes_px[samples], draws, side_px)
    factors = np.stack([draws.hue, draws.saturation, draws.value], axis=-1)[..., None, None, :]
    levels = np.arange(256)[:, None] * factors  # (2, N, 1, 256, 3), of OpenCV's 8-bit HSV
    levels[..., 2] += 255 * draws.value_shift[..., None, None]
    tables = np.rint(levels).clip(0, 255).astype(np.uint8)
    for number, sample in enumerate(samples):
        source = np.asarray(cv2.imread(files.paths[sample], cv2.IMREAD_COLOR))
        for view in range(2):
            warped = cv2.warpAffine(source, matrices[view, number], (side_px, side_px), flags=cv2.INTER_LINEAR)
            hsv = cv2.cvtColor(warped, cv2.COLOR_BGR2HSV, dst=warped)
            hsv = cv2.LUT(hsv, tables[view, number], dst=hsv)
            cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=views[view, number].numpy())
    return views.permute(0, 1, 4, 2, 3)


def opencv_matrices(boxes_px: Any, draws: Draws, view_px: int) -> DoubleArray:
    """`source_to_view_px` for cv2.warpAffine, whose frames have their origins in the first pixel's centre."""
    matrices = source_to_view_px(boxes_px, draws, view_px)
    matrices[..., 2] += matrices[..., :2].sum(axis=-1) / 2 - 0.5
    return matrices


_NORMALISED = Compose([ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])


def make_batch_as_authors(files: Files, samples: Sequence[int]) -> Any:
    """First views (N, 3, S, S) float32 and their matrices (N, 2, 3) from source to view; then the second ones."""
    draws, made = draw(len(samples), 2), list[Any]()
    for number, sample in enumerate(samples):
        source = cv2.cvtColor(np.asarray(cv2.imread(files.paths[sample])), cv2.COLOR_BGR2RGB)
        box_px = files.boxes_px[sample].tolist()
        views = [make_view(source, box_px, draws.at(number, view), files.side_px) for view in range(2)]
        made.append((*views[0], *views[1]))
    return default_collate(made)


def make_view(source: Any, box_px: Sequence[float], drawn: Draws, view_px: int) -> tuple[Tensor, Tensor]:
    """Rotate the whole image, crop (at most to its border), resize by area, jitter, ToTensor and Normalize."""
    x_px, y_px, side_px = box_px
    turn_px = cv2.getRotationMatrix2D((x_px, y_px), -drawn.rotation_deg, 1.0)
    turned = cv2.warpAffine(source, turn_px, (source.shape[1], source.shape[0]))
    crop_px = round(side_px / drawn.scale)
    left = max(round(x_px - crop_px * (0.5 + drawn.x_frac)), 0)
    top = max(round(y_px - crop_px * (0.5 + drawn.y_frac)), 0)
    crop = turned[top : top + crop_px, left : left + crop_px]
    view = cv2.resize(crop, (view_px, view_px), interpolation=cv2.INTER_AREA)
    matrix_px = (turn_px - [[0, 0, left], [0, 0, top]]) * [[view_px / crop.shape[1]], [view_px / crop.shape[0]]]
    hue, saturation, value = cv2.split(cv2.cvtColor(view, cv2.COLOR_RGB2HSV))
    jittered = [hue * drawn.hue, saturation * drawn.saturation, value * drawn.value + 255 * drawn.value_shift]
    hsv = cv2.merge([np.clip(channel, 0, 255).astype(np.uint8) for channel in jittered])
    return _NORMALISED(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)), torch.from_numpy(matrix_px.astype(np.float32))

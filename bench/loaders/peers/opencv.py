"""Peers that use OpenCV in worker processes of torch's DataLoader: with the authors' steps, with fewer, and tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor

from peclr_dali.bench.loaders.peers.paper_draws import VIEW_PX, PeerDraw, draw, source_to_view_px, whole_image_px
from peclr_dali.bench.loaders.peers.workers import Files, ViewsOfFiles

_NORMALISED: Final = Compose([ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])

_LEVELS: Final = np.arange(256, dtype=np.float32)


class OpencvSamples(Files[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """The authors' augmentation in fewer steps: one warp from the source to the view, and uint8 views."""

    _rng: np.random.Generator | None = None

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First view (3, 128, 128) uint8 and its matrix (2, 3) float32 from source to view; then the second's."""
        if self._rng is None:  # a generator for each worker
            self._rng = np.random.default_rng(torch.initial_seed())
        bgr = cv2.imread(self.paths[sample])
        if bgr is None:
            raise ValueError(f"{self.paths[sample]}: OpenCV cannot read it")
        source = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
        box_px = self.boxes_px[sample].tolist()
        box_px = box_px if box_px[2] else whole_image_px(source.shape[1], source.shape[0])
        first, second = draw(2, self._rng)
        return *self._view(source, box_px, first), *self._view(source, box_px, second)

    def _view(self, source: Any, box_px: Sequence[float], one: PeerDraw) -> tuple[Tensor, Tensor]:
        matrix_px = source_to_view_px(box_px, one)
        warped = cv2.warpAffine(source, matrix_px, (VIEW_PX, VIEW_PX))
        view = torch.from_numpy(jitter_hsv(warped, one)).permute(2, 0, 1)
        return view, torch.from_numpy(matrix_px.astype(np.float32))


def jitter_hsv(view: Any, one: PeerDraw) -> npt.NDArray[np.uint8]:
    """Scale hue and saturation and map the value of (H, W, 3) RGB, in OpenCV's 8-bit HSV."""
    hue, saturation, value = cv2.split(cv2.cvtColor(view, cv2.COLOR_RGB2HSV))
    jittered = [hue * one.hue, saturation * one.saturation, value * one.value + 255 * one.value_shift]
    hsv = cv2.merge([np.clip(channel, 0, 255).astype(np.uint8) for channel in jittered])
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB))


class AuthorsSamples(OpencvSamples):
    """The pipeline of PeCLR's authors, with their steps and their tools. All peers draw from the same ranges.

    Rotate the whole image, crop (at most to the image's border), resize by area, jitter in OpenCV's 8-bit HSV, ToTensor
    and Normalize: float32. Their work on keypoints is left out.
    """

    def _view(self, source: Any, box_px: Sequence[float], one: PeerDraw) -> tuple[Tensor, Tensor]:
        height, width = source.shape[:2]
        x_px, y_px, side_px = box_px
        turn_px = cv2.getRotationMatrix2D((x_px, y_px), -one.rotation_deg, 1.0)
        turned = cv2.warpAffine(source, turn_px, (width, height))
        crop_px = round(side_px / one.scale)
        left = max(round(x_px - crop_px * (0.5 + one.x_frac)), 0)
        top = max(round(y_px - crop_px * (0.5 + one.y_frac)), 0)
        crop = turned[top : top + crop_px, left : left + crop_px]
        view = cv2.resize(crop, (VIEW_PX, VIEW_PX), interpolation=cv2.INTER_AREA)
        factor = [[VIEW_PX / crop.shape[1]], [VIEW_PX / crop.shape[0]]]
        matrix_px = (turn_px - [[0, 0, left], [0, 0, top]]) * factor
        return _NORMALISED(jitter_hsv(view, one)), torch.from_numpy(matrix_px.astype(np.float32))


class OpencvViews(ViewsOfFiles):
    """OpenCV made faster: whole batches in shared memory, look-up tables in HSV, no float."""

    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[PeerDraw, PeerDraw], out: Tensor) -> None:
        """imread, then for each view one warp from source to view and one look-up in HSV."""
        source = cv2.imread(path, cv2.IMREAD_COLOR)
        if source is None:
            raise ValueError(f"{path}: OpenCV cannot read it")
        box_px = box_px if box_px[2] else whole_image_px(source.shape[1], source.shape[0])
        for view, one in zip(out.numpy(), draws, strict=True):
            warped = cv2.warpAffine(source, source_to_view_px(box_px, one), (VIEW_PX, VIEW_PX), flags=cv2.INTER_LINEAR)
            hsv = cv2.cvtColor(warped, cv2.COLOR_BGR2HSV, dst=warped)
            cv2.cvtColor(cv2.LUT(hsv, hsv_table(one), dst=hsv), cv2.COLOR_HSV2RGB, dst=view)


def hsv_table(one: PeerDraw) -> npt.NDArray[np.uint8]:
    """(1, 256, 3) look-up table of one draw for OpenCV's 8-bit HSV."""
    table = np.empty((1, 256, 3), np.uint8)
    table[0, :, 0] = np.rint(_LEVELS * one.hue)
    table[0, :, 1] = np.rint(_LEVELS * one.saturation)
    table[0, :, 2] = np.minimum(np.rint(_LEVELS * one.value + 255 * one.value_shift), 255)
    return table

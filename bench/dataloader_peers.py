"""Peers that run on torch's DataLoader: one worker process a core."""

from __future__ import annotations

import math
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import Compose, InterpolationMode, Normalize, ToTensor
from torchvision.transforms.v2 import functional

from bench.augmentation import VIEW_PX, Draw, draw, endless_batches

PREFETCH_BATCHES: Final = 2
"""Batches that a worker makes ahead, torch's own default; 4 and 8 were no faster."""

_NORMALISED: Final = Compose([ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])

_LEVELS: Final = np.arange(256, dtype=np.float32)


class OpencvSamples(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """The authors' jitter in fewer steps than theirs: one warp, straight from the source, and uint8 handed over.

    Args:
        paths: (N,) image files.
        boxes_px: (N, 3) centre x, centre y and side of the square around the hand; side 0 is the whole image.
    """

    def __init__(self, paths: Sequence[Path], boxes_px: npt.NDArray[np.float32]) -> None:
        self.paths = [str(path) for path in paths]
        self.boxes_px = boxes_px
        self._rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First view (3, 128, 128) uint8 and its matrix (2, 3) float32 from source to view; then the second's."""
        if self._rng is None:  # each worker its own
            self._rng = np.random.default_rng(torch.initial_seed())
        bgr = cv2.imread(self.paths[sample])
        if bgr is None:
            raise ValueError(f"{self.paths[sample]}: OpenCV cannot read it")
        source = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
        box_px = self.boxes_px[sample].tolist()
        box_px = box_px if box_px[2] else whole_image_px(source.shape[1], source.shape[0])
        first, second = draw(2, self._rng)
        return *self._view(source, box_px, first), *self._view(source, box_px, second)

    def _view(self, source: Any, box_px: Sequence[float], one: Draw) -> tuple[Tensor, Tensor]:
        matrix_px = source_to_view_px(box_px, one)
        warped = cv2.warpAffine(source, matrix_px, (VIEW_PX, VIEW_PX))
        view = torch.from_numpy(jitter_hsv(warped, one)).permute(2, 0, 1)
        return view, torch.from_numpy(matrix_px.astype(np.float32))


def jitter_hsv(view: Any, one: Draw) -> npt.NDArray[np.uint8]:
    """Scale hue and saturation and map the value of (H, W, 3) RGB, in OpenCV's 8-bit HSV."""
    hue, saturation, value = cv2.split(cv2.cvtColor(view, cv2.COLOR_RGB2HSV))
    jittered = [hue * one.hue, saturation * one.saturation, value * one.value + 255 * one.value_shift]
    hsv = cv2.merge([np.clip(channel, 0, 255).astype(np.uint8) for channel in jittered])
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB))


class AuthorsSamples(OpencvSamples):
    """The pipeline of PeCLR's authors in its own steps, with their tools, for the ranges that all peers draw from.

    Turn the whole image, crop (cut off where the image ends), resize by area, jitter in OpenCV's 8-bit HSV, ToTensor
    and Normalize: float32. Left out is what theirs does with the keypoints.
    """

    def _view(self, source: Any, box_px: Sequence[float], one: Draw) -> tuple[Tensor, Tensor]:
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


class ViewsOfFiles(Dataset[Tensor], ABC):
    """Two augmented views of each image of a list, a batch at a time.

    Args:
        paths: (N,) image files.
        boxes_px: (N, 3) centre x, centre y and side of the square around the hand; side 0 is the whole image.
    """

    def __init__(self, paths: Sequence[Path], boxes_px: npt.NDArray[np.float32]) -> None:
        self.paths = [str(path) for path in paths]
        self.boxes_px = boxes_px

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, samples: Sequence[int]) -> Tensor:
        """The views of a batch, (2, N, 3, 128, 128) uint8 in shared memory, channels-last."""
        views = self.empty((2, len(samples), VIEW_PX, VIEW_PX, 3))
        draws = draw(2 * len(samples), np.random.default_rng(int(torch.randint(2**62, ()))))
        for place, sample in enumerate(samples):
            pair = (draws[2 * place], draws[2 * place + 1])
            self.make_views(self.paths[sample], self.boxes_px[sample].tolist(), pair, views[:, place])
        return views.permute(0, 1, 4, 2, 3)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised uint8, in shared memory from the start, so that handing over copies nothing."""
        storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)

    @abstractmethod
    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[Draw, Draw], out: Tensor) -> None:
        """Write one image's views into `out`, (2, 128, 128, 3) uint8."""


class OpencvViews(ViewsOfFiles):
    """OpenCV with what makes it faster: whole batches in shared memory, look-up tables in HSV, no float."""

    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[Draw, Draw], out: Tensor) -> None:
        """imread, then for each view one warp from source to view and one look-up in HSV."""
        source = cv2.imread(path, cv2.IMREAD_COLOR)
        if source is None:
            raise ValueError(f"{path}: OpenCV cannot read it")
        box_px = box_px if box_px[2] else whole_image_px(source.shape[1], source.shape[0])
        for view, one in zip(out.numpy(), draws, strict=True):
            warped = cv2.warpAffine(source, source_to_view_px(box_px, one), (VIEW_PX, VIEW_PX), flags=cv2.INTER_LINEAR)
            hsv = cv2.cvtColor(warped, cv2.COLOR_BGR2HSV, dst=warped)
            cv2.cvtColor(cv2.LUT(hsv, hsv_table(one), dst=hsv), cv2.COLOR_HSV2RGB, dst=view)


class TorchvisionViews(ViewsOfFiles):
    """The way of torchvision's users: its decoder and the functional transforms of v2, on uint8."""

    def make_views(self, path: str, box_px: Sequence[float], draws: tuple[Draw, Draw], out: Tensor) -> None:
        """decode_image, the box resized once, then for each view affine and colour at the view's size."""
        source = decode_image(path, ImageReadMode.RGB, apply_exif_orientation=True)
        for view, made in zip(out, torchvision_views(source, box_px, draws), strict=True):
            view.copy_(made.permute(1, 2, 0))


def torchvision_views(source: Tensor, box_px: Sequence[float], draws: Sequence[Draw]) -> Iterator[Tensor]:
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


def whole_image_px(width_px: int, height_px: int) -> tuple[float, float, float]:
    """The square around a whole image: centre x, centre y, side."""
    return width_px / 2, height_px / 2, float(max(width_px, height_px))


def source_to_view_px(box_px: Sequence[float], one: Draw) -> npt.NDArray[np.float64]:
    """(2, 3) from source to view for cv2.warpAffine, whose frame has its origin in the first pixel's centre."""
    x_px, y_px, side_px = box_px
    magnification = one.scale * VIEW_PX / side_px
    cosine = magnification * math.cos(math.radians(one.rotation_deg))
    sine = magnification * math.sin(math.radians(one.rotation_deg))
    x_px, y_px = x_px - 0.5, y_px - 0.5
    center_px = VIEW_PX / 2 - 0.5
    return np.array(
        [
            [cosine, -sine, center_px + one.x_frac * VIEW_PX - cosine * x_px + sine * y_px],
            [sine, cosine, center_px + one.y_frac * VIEW_PX - sine * x_px - cosine * y_px],
        ]
    )


def hsv_table(one: Draw) -> npt.NDArray[np.uint8]:
    """(1, 256, 3) look-up table for OpenCV's 8-bit HSV."""
    table = np.empty((1, 256, 3), np.uint8)
    table[0, :, 0] = np.rint(_LEVELS * one.hue)
    table[0, :, 1] = np.rint(_LEVELS * one.saturation)
    table[0, :, 2] = np.minimum(np.rint(_LEVELS * one.value + 255 * one.value_shift), 255)
    return table


def start_authors(paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int) -> Iterator[int]:
    """Endless sizes of batches made by the authors' steps in `threads` worker processes."""
    for first, *_ in sample_loader(AuthorsSamples(paths, boxes_px), threads, batch):
        yield len(first)


def start_opencv(paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int) -> Iterator[int]:
    """Endless sizes of batches made a sample at a time by OpenCV in `threads` worker processes."""
    for first, *_ in sample_loader(OpencvSamples(paths, boxes_px), threads, batch):
        yield len(first)


def start_tuned_opencv(
    paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int
) -> Iterator[int]:
    """Endless sizes of batches made by tuned OpenCV in `threads` worker processes."""
    return _sizes(OpencvViews(paths, boxes_px), threads, batch)


def start_torchvision(
    paths: Sequence[Path], boxes_px: npt.NDArray[np.float32], threads: int, batch: int
) -> Iterator[int]:
    """Endless sizes of batches made by torchvision in `threads` worker processes."""
    return _sizes(TorchvisionViews(paths, boxes_px), threads, batch)


def _sizes(dataset: ViewsOfFiles, workers: int, batch: int) -> Iterator[int]:
    for views in batch_loader(dataset, workers, batch):
        yield views.shape[1]


def sample_loader(dataset: Dataset[Any], workers: int, batch: int) -> DataLoader[Any]:
    """A DataLoader as torch's tutorials write it, over endless batches: default collation, default prefetching."""
    return _loader(dataset, workers, batch, None)


def batch_loader(dataset: ViewsOfFiles, workers: int, batch: int) -> DataLoader[Tensor]:
    """A DataLoader over endless batches; its tensors are those that the workers filled."""
    return _loader(dataset, workers, batch, _as_it_is)


def _loader(dataset: Dataset[Any], workers: int, batch: int, collate: Callable[[Any], Any] | None) -> DataLoader[Any]:
    context = multiprocessing.get_context("forkserver")  # a plain fork is unsafe beside DALI's threads
    context.set_forkserver_preload([__name__])
    return DataLoader(
        dataset,
        batch_sampler=endless_batches(len(dataset), batch),  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=_one_thread,
        prefetch_factor=PREFETCH_BATCHES,
        multiprocessing_context=context,
        persistent_workers=True,
    )


def _as_it_is(views: Any) -> Any:
    return views


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)

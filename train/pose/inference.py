"""Estimates the poses of all images of an index, from views without augmentation."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peclr_dali.models.pose import PoseNetwork, view_intrinsics
from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, FloatArray, IntArray, PixelArray
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder, Schedule
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig, without_augmentation
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, on_all_ranks
from peclr_dali.train.steps.train_state import PRECISIONS

Progress = Callable[[int, int], None]
"""Called with the number of images done and the number of all images."""

BOX_IN_VIEW = 0.7
"""Side of a box over the side of the view around it."""


TURNS_DEG: Final = (-60.0, -20.0, 20.0, 60.0)
"""Angles of the views whose keypoints are compared by `spread_px`."""


class Poses(NamedTuple):
    """A network's predictions for N images.

    Attributes:
        samples: (N,) rows of the index that were used; a bad file is replaced by a substitute.
        in_view_px: (N, K, 2) in pixels of the view, as the network gives them.
        keypoints_px: (N, K, 2) in pixels of the source as decoded, corner-based. Keypoint 0 is the wrist, for
            a network that predicts the palm in its place too.
        joints: (N, K, 3) in the source camera's frame, in units of the reference bone's length.
        source_to_view_px: (N, 2, 3), from the source's pixels to the view's.
        images: (M, S, S, 3) uint8, the views of the first M images, kept for pictures.
    """

    samples: IntArray
    in_view_px: DoubleArray
    keypoints_px: DoubleArray
    joints: DoubleArray
    source_to_view_px: DoubleArray
    images: PixelArray


@contextmanager
def inference(device: torch.device, autocast_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run networks without gradients, under autocast if asked; float32 is float32, not TF32, on GPUs too."""
    cudnn = torch.backends.cudnn
    with (
        torch.inference_mode(),
        cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=cudnn.deterministic,
            allow_tf32=False,
            fp32_precision="ieee",
        ),
        torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
    ):
        yield


def canonical_view(geometry: GeometryConfig, rotation_deg: float = 0.0) -> Augmentation:
    """The augmentation that only rotates the canonical view of a configuration, by a fixed angle."""
    still = dataclasses.replace(without_augmentation(geometry), rotation_deg=(rotation_deg, rotation_deg))
    return Augmentation(still, ColourConfig(jitter="none"))


def canonical_loader(
    index: Index,
    rows: IntArray,
    rows_of_rank: int,
    config: Config | FinetuneConfig,
    world: World,
    rotation_deg: float = 0.0,
) -> Loader:
    """Loads this rank's share of the canonical views of `rows` (N,) of an index, each rotated by `rotation_deg`.

    Every step has `rows_of_rank` rows for each rank. Surplus rows of the last step have positions from N on.
    """
    step_rows, first = rows_of_rank * world.world_size, rows_of_rank * world.rank
    return build_loader(
        index,
        Schedule(
            EpochOrder(len(index), len(rows), seed=0, fixed=rows),
            step_rows,
            range(first, first + rows_of_rank),
            last_step=-(-len(rows) // step_rows),
        ),
        config.pipelines,
        canonical_view(config.geometry, rotation_deg),
        device=world.device,
        views=1,
        processes_here=world.local_world_size,
    )


def estimate_steps(
    network: PoseNetwork,
    loader: Loader,
    intrinsics: FloatArray,
    config: FinetuneConfig,
    world: World,
    count: int,
    *,
    keep_images: int = 0,
    origin_px: float = 0.5,
) -> Iterator[Poses]:
    """Estimate the poses of each step of a loader of `count` canonical views; other arguments as in `estimate_poses`.

    A step of this rank has n poses; the surplus rows of the last step are left out.
    """
    precision = config.train.precision
    dtype, autocast_dtype = PRECISIONS["fp32" if precision == "auto" else precision]
    network = network.to(world.device, dtype).eval()
    for batch in loader:
        view, samples = batch.to(world.device).views[0], batch.samples[:, 0].numpy()
        affine = view.source_to_view_px.clone()  # corner-based
        affine[:, :, 2] += (0.5 - origin_px) * (affine[:, :, :2].sum(dim=2) - 1)
        of_view = view_intrinsics(to_device(intrinsics[samples], world.device).to(dtype), affine)  # not in 16 bits
        with inference(world.device, autocast_dtype):
            output = network(view.image, of_view)
        here = slice(int((batch.positions < count).sum()))  # without the surplus rows
        kept = slice(int((batch.positions < min(keep_images, count)).sum()))
        samples, affine = samples[here], affine[here].double().cpu()
        in_view_px, joints = output.keypoints_px[here].double().cpu(), output.joints[here].double().cpu().numpy()
        in_source_px = from_view(in_view_px, affine).numpy()
        if config.pose.first_keypoint == "palm":  # in 2D; the joints have the wrist there already
            wrist = np.einsum("nij,nj->ni", intrinsics[samples].astype(np.float64), joints[:, 0])
            in_source_px[:, 0] = wrist[:, :2] / wrist[:, 2:]
        yield Poses(
            samples=samples,
            in_view_px=in_view_px.numpy(),
            keypoints_px=in_source_px,
            joints=joints,
            source_to_view_px=affine.numpy(),
            images=view.image[kept].permute(0, 2, 3, 1).cpu().numpy(),
        )


def spread_px(turned: Sequence[Poses]) -> DoubleArray:
    """How far apart turned views of N images have the keypoints: (N,), mean distance from their means.

    In pixels of the source. What a network does not know for certain, it gives differently in each view.
    """
    keypoints_px = np.stack([poses.keypoints_px for poses in turned])
    return np.asarray(np.linalg.norm(keypoints_px - keypoints_px.mean(axis=0), axis=3).mean(axis=(0, 2)))


def estimate_poses(
    network: PoseNetwork,
    index: Index,
    intrinsics: FloatArray,
    config: FinetuneConfig,
    world: World,
    *,
    keep_images: int = 0,
    rotation_deg: float = 0.0,
    origin_px: float = 0.5,
    progress: Progress = lambda done, total: None,
) -> Poses:
    """Estimate the poses of all images of an index, in its order. The ranks share the work; all get the result.

    The network is moved to the world's device and set to eval mode.

    Args:
        intrinsics: (N, 3, 3) camera matrix of each image as decoded, corner-based.
        config: `validation.batch` is the number of images in a step over all ranks. `train.precision = "auto"` is
            fp32 here on all devices. The ranges of `geometry` are not used.
        keep_images: number of the first views to return.
        rotation_deg: angle by which every view is rotated, see `GeometryConfig`; the poses are the source's.
        origin_px: coordinate of the first pixel's centre, in the pixels of source and view; 0.5 is corner-based.

    Raises:
        UserError: too many files are bad to find substitutes.
    """
    count = len(index)
    # Rows of each rank in a step, including surplus rows of the last step.
    rows_of_rank = -(-min(config.validation.batch, count) // world.world_size)

    steps = []
    with (
        on_all_ranks(world),
        canonical_loader(index, np.arange(count), rows_of_rank, config, world, rotation_deg) as loader,
    ):
        for poses in estimate_steps(
            network, loader, intrinsics, config, world, count, keep_images=keep_images, origin_px=origin_px
        ):
            steps.append(poses)
            progress(min(len(steps) * rows_of_rank * world.world_size, count), count)
    in_order = [poses for of_step in zip(*world.gather_objects(steps), strict=True) for poses in of_step]
    return Poses(*(np.concatenate(columns) for columns in zip(*in_order, strict=True)))


def estimate_in_two_passes(
    network: PoseNetwork,
    index: Index,
    intrinsics: FloatArray,
    config: FinetuneConfig,
    world: World,
    *,
    keep_images: int = 0,
    progress: Progress = lambda done, total: None,
) -> Poses:
    """Estimate poses without the boxes of the index; arguments and result as in `estimate_poses`.

    The first box is in the middle of the image, and its side is 0.33 of the image's longer side; the second is the
    rectangle around the predicted 2D keypoints, in whole pixels of the first view. The box's longer side is
    `BOX_IN_VIEW` of the view's side; the view is black outside the image, and images are not halved before they are
    warped. Left hands are mirrored in both views, as in training.

    The authors' code counts pixels from the first pixel's centre. For the authors' networks
    (`pose.first_keypoint = "palm"`), this function does the same. For ours, it counts from the corner, as in training.
    """
    config = dataclasses.replace(config, geometry=dataclasses.replace(config.geometry, fill=0, antialias=False))
    origin_px = 0.0 if config.pose.first_keypoint == "palm" else 0.5
    # Width and height; 0 for what cannot be read. One image at a time: all of a store would take much memory.
    sizes_px = image_sizes_px(data for row in range(len(index)) for data in index.read_many([row]))[:, ::-1]
    middle = boxes_in_views(
        sizes_px / 2, 0.33 * sizes_px.max(axis=1), index.mirrored, config.geometry.side_px, origin_px
    )
    index = dataclasses.replace(index, box_px=middle)
    first = estimate_poses(network, index, intrinsics, config, world, origin_px=origin_px, progress=progress)
    seen_px = np.nan_to_num(first.in_view_px).clip(-1e5, 1e5)  # which a box can hold
    edges_px = np.trunc(np.stack([seen_px.min(axis=1), seen_px.max(axis=1)], axis=1))  # (N, 2, 2)
    corners_px = from_view(torch.from_numpy(edges_px), torch.from_numpy(first.source_to_view_px)).numpy()
    longer_px = np.abs(corners_px[:, 1] - corners_px[:, 0]).max(axis=1)  # of a mirrored view, the first is on the right
    around = boxes_in_views(
        corners_px.mean(axis=1), longer_px.clip(min=1), index.mirrored, config.geometry.side_px, origin_px
    )
    index = dataclasses.replace(index, box_px=around)
    return estimate_poses(
        network, index, intrinsics, config, world, keep_images=keep_images, origin_px=origin_px, progress=progress
    )


def boxes_in_views(
    centre_px: DoubleArray, side_px: DoubleArray, mirror: BoolArray, view_side_px: int, origin_px: float
) -> FloatArray:
    """Boxes (N, 3) for the loader, whose canonical views have the given boxes in the middle, at `BOX_IN_VIEW`.

    Args:
        centre_px: (N, 2) centres of the given boxes, in the source.
        side_px: (N,) sides of the given boxes, in the source.
        mirror: (N,) the views that are mirrored, left for right.
        view_side_px: side of the views.
        origin_px: coordinate of the first pixel's centre, in `centre_px` and in the view whose middle is
            `view_side_px` / 2; the loader counts from 0.5.
    """
    source_px = side_px / (BOX_IN_VIEW * view_side_px)  # pixels of the source for one of the view
    across_px = np.stack([np.where(mirror, -source_px, source_px), source_px], axis=1)
    centre_px = centre_px + (0.5 - origin_px) * (1 - across_px)
    return np.column_stack([centre_px, side_px / BOX_IN_VIEW]).astype(np.float32)


def from_view(points_px: Tensor, source_to_view_px: Tensor) -> Tensor:
    """Points (N, J, 2) of views in pixels of their sources, given the maps (N, 2, 3) from source to view."""
    shifted = (points_px - source_to_view_px[:, None, :, 2]).mT
    in_source_px: Tensor = torch.linalg.solve(source_to_view_px[:, :, :2], shifted).mT
    return in_source_px

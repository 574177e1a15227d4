"""Estimates the poses of all images of an index, from views without augmentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peclr_dali.models.config import PoseConfig
from peclr_dali.models.pose import PoseNetwork, view_intrinsics
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.loader.loader import Loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder, RankSlice, Schedule
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig, without_augmentation
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.all_ranks import on_all_ranks
from peclr_dali.train.distributed.world import World
from peclr_dali.train.steps.precision import PRECISIONS

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with the number of images done and the number of all images."""


@dataclass(frozen=True)
class Poses:
    """A network's predictions for N images.

    Attributes:
        samples: (N,) rows of the index that were used; a bad file is replaced by a substitute.
        keypoints_px: (N, K, 2) in pixels of the source as decoded, corner-based. Keypoint 0 is the wrist, for
            a network that predicts the palm in its place too.
        joints: (N, K, 3) in the source camera's frame, in units of the reference bone's length.
        image_rows: (M,) the rows, among the N predictions, of the views in `images`.
        images: (M, S, S, 3) uint8, views that this rank kept for pictures.
        source_to_view_px: (N, 2, 3), from the source's pixels to the view's.
    """

    samples: npt.NDArray[np.int64]
    keypoints_px: Floats
    joints: Floats
    image_rows: npt.NDArray[np.int64]
    images: npt.NDArray[np.uint8]
    source_to_view_px: Floats


@contextmanager
def inference(device: torch.device, autocast_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run networks without gradients, under autocast if asked; float32 is float32, not TF32, on GPUs too."""
    cudnn = torch.backends.cudnn
    flags = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    with (
        torch.inference_mode(),
        cudnn.flags(**flags, allow_tf32=False, fp32_precision="ieee"),
        torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
    ):
        yield


def canonical_view(geometry: GeometryConfig, rotation_deg: float = 0.0) -> Augmentation:
    """The augmentation that only rotates the canonical view of a configuration, by a fixed angle."""
    still = dataclasses.replace(without_augmentation(geometry), rotation_deg=(rotation_deg, rotation_deg))
    return Augmentation(still, ColourConfig(jitter="none"))


def canonical_loader(
    index: Index,
    rows: npt.NDArray[np.int64],
    each: int,
    config: Config | FinetuneConfig,
    world: World,
    rotation_deg: float = 0.0,
) -> Loader:
    """Loads this rank's share of the canonical views of `rows` (N,) of an index, each rotated by `rotation_deg`.

    Every step has `each` rows for each rank. Surplus rows of the last step have positions from N on.
    """
    step_rows, first = each * world.world_size, each * world.rank
    return Loader(
        index,
        Schedule(
            EpochOrder(len(index), len(rows), seed=0, fixed=rows),
            RankSlice(step_rows, first, first + each),
            last_step=-(-len(rows) // step_rows),
        ),
        config.pipelines,
        canonical_view(config.geometry, rotation_deg),
        device=world.device,
        views=1,
        processes_here=world.local_world_size,
    )


def estimate_poses(
    network: PoseNetwork,
    index: Index,
    intrinsics: npt.NDArray[np.float32],
    config: FinetuneConfig,
    world: World,
    *,
    keep_images: int = 0,
    rotation_deg: float = 0.0,
    progress: Progress | None = None,
) -> Poses:
    """Estimate the poses of all images of an index, in its order. The ranks share the work; all get the result.

    The network is moved to the world's device and set to eval mode.

    Args:
        intrinsics: (N, 3, 3) camera matrix of each image as decoded, corner-based.
        config: `validation.batch` is the number of images in a step over all ranks. `train.precision = "auto"` is
            fp32 here on all devices. The ranges of `geometry` are not used.
        keep_images: number of this rank's first views to return.
        rotation_deg: angle by which every view is rotated, see `GeometryConfig`; the poses are the source's.

    Raises:
        UserError: too many files are bad to find substitutes.
    """
    precision = config.train.precision
    dtype, autocast_dtype = PRECISIONS["fp32" if precision == "auto" else precision]
    network = network.to(world.device, dtype).eval()
    count = len(index)
    # Rows of each rank in a step, including surplus rows of the last step.
    each = -(-min(config.validation.batch, count) // world.world_size)
    parts: list[tuple[Tensor, ...]] = []
    images: dict[int, npt.NDArray[np.uint8]] = {}

    with (
        on_all_ranks(world),
        canonical_loader(index, np.arange(count), each, config, world, rotation_deg) as loader,
    ):
        for step, made in enumerate(loader):
            view, rows = made.to(world.device).views[0], made.samples[:, 0]
            source = to_device(intrinsics[rows.numpy()], world.device).to(dtype)
            of_view = view_intrinsics(source, view.source_to_view_px)  # not in 16 bits
            with inference(world.device, autocast_dtype):
                output = network(view.image, of_view)
            affine = view.source_to_view_px.double().cpu()
            in_source = from_view(output.keypoints_px.double().cpu(), affine)
            parts.append((made.positions, rows, in_source, output.joints.double().cpu(), affine))
            for row, position in enumerate(made.positions.tolist()):
                if len(images) < keep_images and position < count:
                    images[position] = view.image[row].permute(1, 2, 0).cpu().numpy()
            if progress is not None:
                progress(min((step + 1) * each * world.world_size, count), count)

    of_all_ranks = [part for of_rank in world.gather_objects(parts) for part in of_rank]
    positions, *tables = (torch.cat(columns) for columns in zip(*of_all_ranks, strict=True))
    in_order = positions.argsort()[:count]  # without the surplus rows
    samples, in_px, in_3d, matrices = (table[in_order].numpy() for table in tables)
    side_px = config.geometry.side_px
    return Poses(
        samples,
        with_wrist(in_px, in_3d, intrinsics[samples], config.pose),
        in_3d,
        np.array(list(images), np.int64),
        np.stack(list(images.values())) if images else np.empty((0, side_px, side_px, 3), np.uint8),
        matrices,
    )


def from_view(keypoints_px: Tensor, source_to_view_px: Tensor) -> Tensor:
    """Keypoints (N, K, 2) of views in pixels of their sources, given the matrices (N, 2, 3) from source to view."""
    shifted = (keypoints_px - source_to_view_px[:, None, :, 2]).mT
    points_px: Tensor = torch.linalg.solve(source_to_view_px[:, :, :2], shifted).mT
    return points_px


def with_wrist(keypoints_px: Floats, joints: Floats, intrinsics: npt.NDArray[np.float32], pose: PoseConfig) -> Floats:
    """2D keypoints (N, K, 2) with the wrist as keypoint 0: projected from 3D, if the network predicts the palm there.

    `joints` (N, K, 3) have the wrist already; `intrinsics` (N, 3, 3) are those of the pictures.
    """
    if pose.first_keypoint != "palm":
        return keypoints_px
    wrist = np.einsum("nij,nj->ni", intrinsics.astype(np.float64), joints[:, 0])
    return np.concatenate([(wrist[:, :2] / wrist[:, 2:])[:, None], keypoints_px[:, 1:]], axis=1)

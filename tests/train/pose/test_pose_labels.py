"""Labels go through the matrix that made the view: pixels, keypoints, intrinsics and depths stay of one hand."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.pose import back_project, normalize_keypoints, project
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.pose.labels import PoseLabels, labels_to_learn
from tests.pipelines.harness import RENDERERS, make_views
from tests.train.tiny_hands import random_hands_m

COUNT, HEIGHT, WIDTH = 16, 200, 240
CAMERA = np.array([[400.0, 0, 118], [0, 410, 104], [0, 0, 1]])


def labelled(hands_m: npt.NDArray[np.float64], **targets: npt.NDArray[np.float32]) -> Index:
    homogeneous = hands_m @ CAMERA.T
    count = len(hands_m)
    return Index(
        name="dots",
        root=Path("dots"),
        paths=[str(row) for row in range(count)],
        box_px=np.tile(np.array([120, 100, 150], np.float32), (count, 1)),
        keypoints_px=(homogeneous[..., :2] / homogeneous[..., 2:]).astype(np.float32),
        targets={
            "K": np.tile(CAMERA.astype(np.float32), (count, 1, 1)),
            "xyz_m": hands_m.astype(np.float32),
            **targets,
        },
    )


def dot_images(points_px: npt.NDArray[np.floating]) -> list[npt.NDArray[np.uint8]]:
    """A soft white dot at (x, y), corner-based, of each image."""
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    dots = [np.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * 4.0**2)) for px, py in points_px]
    return [np.repeat(np.rint(dot * 255).astype(np.uint8)[..., None], 3, axis=2) for dot in dots]


def centroids_px(image: Tensor) -> npt.NDArray[np.float64]:
    """Centres of mass (N, 2) of the brightness of (N, 3, S, S)."""
    weight = image[:, 0].double().numpy()
    centre = np.arange(weight.shape[1]) + 0.5
    moments = np.stack([weight.sum(axis=1) @ centre, weight.sum(axis=2) @ centre], axis=1)
    return np.asarray(moments / weight.sum(axis=(1, 2))[:, None])


@pytest.fixture(scope="module")
def hands_m() -> npt.NDArray[np.float64]:
    return random_hands_m(np.random.default_rng(1), COUNT)


def augmented(renderer: Literal["dali", "cpu"], index: Index, keypoint: int) -> View:
    """Views of dots at one keypoint, over the ranges of fine-tuning; at 128 px the dots stay inside."""
    geometry = replace(FinetuneConfig().geometry, scale=(0.7, 1.0))
    colour = ColourConfig(jitter="none")
    draws = draw_view(Augmentation(geometry, colour), seed=5, epoch=0, view=0, places=np.arange(COUNT))
    images = dot_images(index.tables["keypoints_px"][:, keypoint])
    return make_views(renderer, images, index.box_px, [draws], geometry, colour)[0]


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("keypoint", [0, 9, 10])
def test_pixels_keypoints_and_intrinsics_stay_consistent(
    renderer: Literal["dali", "cpu"], keypoint: int, hands_m: npt.NDArray[np.float64]
) -> None:
    index = labelled(hands_m)
    view = augmented(renderer, index, keypoint)
    targets = PoseLabels.of(index).of_view(view, torch.arange(COUNT), PoseConfig())
    seen_px = centroids_px(view.image)
    assert np.abs(targets.keypoints_px[:, keypoint].numpy() - seen_px).max() < 0.1
    projected_px = project(torch.from_numpy(hands_m).float(), targets.intrinsics)
    assert np.abs(projected_px[:, keypoint].numpy() - seen_px).max() < 0.1
    assert (projected_px - targets.keypoints_px).abs().max() < 0.01


@pytest.mark.parametrize("root", ["wrist", "middle_mcp"])
def test_the_hand_comes_back_from_its_targets(root: str, hands_m: npt.NDArray[np.float64]) -> None:
    """2.5D, K' and the root's depth restore the joints in the source camera's frame, whatever the augmentation."""
    index = labelled(hands_m)
    labels, pose = PoseLabels.of(index), PoseConfig(root=root)
    targets = labels.of_view(augmented("cpu", index, 0), torch.arange(COUNT), pose, torch.float64)
    assert (targets.relative_depth[:, HAND.keypoints.index(root)] == 0).all()
    depth = targets.relative_depth + targets.root_depth[:, None]
    joints = back_project(normalize_keypoints(targets.keypoints_px, targets.intrinsics), depth)
    np.testing.assert_allclose(joints.numpy() * labels.scale_m[:, None, None], hands_m, atol=1e-6)  # float32
    np.testing.assert_allclose(labels.scale_m, np.linalg.norm(hands_m[:, 9] - hands_m[:, 10], axis=1), rtol=1e-5)


def test_a_given_scale_is_taken(hands_m: npt.NDArray[np.float64]) -> None:
    assert (PoseLabels.of(labelled(hands_m, scale_m=np.full(COUNT, 0.5, np.float32))).scale_m == 0.5).all()


def test_the_palm_stands_halfway_between_wrist_and_middle_mcp(hands_m: npt.NDArray[np.float64]) -> None:
    index = labelled(hands_m)
    view = augmented("cpu", index, 0)
    wrist, palm = (
        PoseLabels.of(index).of_view(view, torch.arange(COUNT), PoseConfig(first_keypoint=first), torch.float64)
        for first in ("wrist", "palm")
    )
    middle = HAND.keypoints.index("middle_mcp")
    palm_m = torch.from_numpy((hands_m[:, :1] + hands_m[:, middle : middle + 1]) / 2)
    torch.testing.assert_close(palm.keypoints_px[:, :1], project(palm_m, wrist.intrinsics), atol=1e-3, rtol=0)
    torch.testing.assert_close(palm.keypoints_px[:, 1:], wrist.keypoints_px[:, 1:])
    torch.testing.assert_close(
        palm.root_depth, wrist.root_depth + wrist.relative_depth[:, middle] / 2, atol=1e-5, rtol=0
    )
    assert (palm.relative_depth[:, 0] == 0).all()


def test_images_without_labels_are_refused() -> None:
    index = Index("photos", Path("photos"), ["a.jpg"], np.zeros((1, 3), np.float32))
    with pytest.raises(UserError, match=r"photos \(photos\) has no K and no xyz_m.*pre-train on this one"):
        labels_to_learn(index)
    with pytest.raises(UserError, match=r"has no K: .* so add K to the targets of its Index, or leave xyz_m out"):
        labels_to_learn(
            replace(index, keypoints_px=np.zeros((1, 21, 2), "f4"), targets={"xyz_m": np.zeros((1, 21, 3), "f4")})
        )

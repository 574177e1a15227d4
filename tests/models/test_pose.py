import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.pose import (
    ROOT_DEPTH_RANGE,
    PoseNetwork,
    back_project,
    normalize_keypoints,
    project,
    solve_root_depth,
    view_intrinsics,
)
from peclr_dali.skeleton import HAND
from peclr_dali.synthetic.poses import LIMITS_RAD, draw_shape, pose_hand

HANDS = 20_000


def relative_depths(joints_m: Tensor, scale_m: Tensor, root: str) -> Tensor:
    """(z - z_root) / scale: (N, 21, 3) and (N,) -> (N, 21)."""
    depth_m = joints_m[..., 2]
    row = HAND.keypoints.index(root)
    return (depth_m - depth_m[:, row : row + 1]) / scale_m[:, None]


def random_hands(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anatomical hands in any orientation, and cameras: joints in metres, scale, intrinsics, view matrices."""
    rng = np.random.default_rng(seed)
    skeletons = [
        pose_hand(draw_shape(rng), rng.uniform(LIMITS_RAD[..., 0], LIMITS_RAD[..., 1])).joints_m
        for _ in range(min(count, 500))
    ]
    hands = np.stack(skeletons)[rng.integers(len(skeletons), size=count)]
    turns = np.linalg.qr(rng.normal(size=(count, 3, 3)))[0]  # mirrored half of the time: left hands
    center = rng.uniform([-0.1, -0.1, 0.35], [0.1, 0.1, 1.2], (count, 3))
    joints = hands @ turns + center[:, None]
    scale = np.linalg.norm(joints[:, HAND.reference_bone[0]] - joints[:, HAND.reference_bone[1]], axis=1)
    intrinsics = np.tile(np.eye(3), (count, 1, 1))
    intrinsics[:, 0, 0], intrinsics[:, 1, 1] = rng.uniform(300, 900, (2, count))
    intrinsics[:, 0, 1] = rng.uniform(-2, 2, count)
    intrinsics[:, :2, 2] = rng.uniform(80, 350, (count, 2))
    linear = np.linalg.qr(rng.normal(size=(count, 2, 2)))[0] * rng.uniform(0.3, 2.5, (count, 1, 1))
    views = np.concatenate([linear, rng.uniform(-100, 200, (count, 2, 1))], axis=2)
    joints_m, scale_m, k, matrix = (torch.from_numpy(array) for array in (joints, scale, intrinsics, views))
    return joints_m, scale_m, k, matrix


def moved(keypoints_px: Tensor, matrix: Tensor) -> Tensor:
    """Source pixels to view pixels."""
    return keypoints_px @ matrix[:, :, :2].mT + matrix[:, None, :, 2]


@pytest.mark.parametrize("root", ["wrist", "middle_mcp"])
def test_3d_hands_come_back_from_exact_25d(root: str) -> None:
    """To a micrometre in every rotated, scaled and mirrored view, wherever the larger root is the right one."""
    joints_m, scale_m, k, matrix = random_hands(HANDS)
    keypoints_px = moved(project(joints_m, k), matrix)
    depths = relative_depths(joints_m, scale_m, root)

    normalized = normalize_keypoints(keypoints_px, view_intrinsics(k, matrix))
    root_depth = solve_root_depth(normalized, depths, HAND.reference_bone)
    found_m = back_project(normalized, depths + root_depth[:, None]) * scale_m[:, None, None]

    # The quadratic equation written out once more, with NumPy, to say for which hands the promise holds.
    true_root = (joints_m[:, HAND.keypoints.index(root), 2] / scale_m).numpy()
    rays = (joints_m / joints_m[..., 2:]).numpy()[:, HAND.reference_bone]  # (N, 2, 3)
    apart, offset = rays[:, 0] - rays[:, 1], (rays * depths.numpy()[:, HAND.reference_bone, None])
    a = (apart**2).sum(1)
    promised = (-(apart * (offset[:, 0] - offset[:, 1])).sum(1) / a < true_root) & (a > 1e-8)
    error_m = (found_m - joints_m).abs().amax((1, 2)).numpy()

    assert error_m[promised].max() < 1e-6
    assert 0.99 < promised.mean() < 1  # of the others the reference bone lies along the ray
    assert np.median(error_m[~promised]) > 1e-4  # the others are really lost


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6))
def test_root_depth_is_finite_for_any_output(values: list[float]) -> None:
    normalized, depths = torch.zeros(2, 21, 2), torch.zeros(2, 21)  # and a hand of zeros
    normalized[0, HAND.reference_bone] = torch.tensor(values[:4]).view(2, 2)
    depths[0, HAND.reference_bone] = torch.tensor(values[4:])
    assert solve_root_depth(normalized, depths, HAND.reference_bone).isfinite().all()


def test_network_turns_a_perfect_head_into_the_true_hand() -> None:
    joints_m, scale_m, k, matrix = random_hands(64, seed=4)
    depths = relative_depths(joints_m, scale_m, "wrist")
    keypoints_px = moved(project(joints_m, k), matrix)
    root_depth = joints_m[:, 0, 2] / scale_m
    usual = (root_depth > ROOT_DEPTH_RANGE[0]) & (root_depth < ROOT_DEPTH_RANGE[1])
    head_output = torch.cat([keypoints_px / 64 - 0.5, depths[..., None]], dim=2)
    head_output[:, 0, 2] = 7  # the head's depth of the root itself is ignored
    network = PoseNetwork(make_encoder("resnet18"), PoseConfig(refine=False)).double().eval()
    network.head = nn.Flatten()
    output = network.from_features(head_output, view_intrinsics(k, matrix), side_px=64)
    torch.testing.assert_close(output.keypoints_px, keypoints_px)
    torch.testing.assert_close(output.relative_depth, depths, atol=1e-12, rtol=0)
    assert torch.equal(output.root_depth, output.root_depth_unrefined)
    error_m = (output.joints * scale_m[:, None, None] - joints_m).abs().amax((1, 2))
    assert (error_m[usual] < 1e-6).double().mean() > 0.95


def test_root_depth_is_clamped_and_refined_without_gradient_through_it() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(make_encoder("resnet18"), PoseConfig()).double()
    features = torch.randn(8, 512, dtype=torch.float64)
    k = torch.eye(3, dtype=torch.float64)[None]  # so short a focal length gives depths below the range
    output = network.from_features(features, k, side_px=128)
    normalized = normalize_keypoints(output.keypoints_px, k)
    solved = solve_root_depth(normalized, output.relative_depth, HAND.reference_bone)
    assert (solved < ROOT_DEPTH_RANGE[0]).sum() > 4
    torch.testing.assert_close(output.root_depth_unrefined, solved.clamp(*ROOT_DEPTH_RANGE))
    assert not output.root_depth_unrefined.requires_grad
    assert network.refinement is not None
    correction = network.refinement(normalized, output.relative_depth, output.root_depth_unrefined)
    torch.testing.assert_close(output.root_depth, output.root_depth_unrefined + correction)
    gradients = torch.autograd.grad(output.root_depth.sum(), list(network.refinement.parameters()))
    assert any(gradient.abs().max() > 0 for gradient in gradients)


def test_forward_reads_pixels_and_keeps_geometry_out_of_autocast() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(make_encoder("resnet18"), PoseConfig(head="mlp", hidden=16)).eval()
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    k = torch.tensor([[[500.0, 0, 32], [0, 500, 32], [0, 0, 1]]])
    with torch.no_grad():
        plain = network(image, k)
        with torch.autocast("cpu", torch.bfloat16):
            half = network(image, k.double())
    assert plain.joints.shape == (2, 21, 3)
    assert all(value.dtype == torch.float32 for value in half)
    exact = back_project(normalize_keypoints(half.keypoints_px, k), half.relative_depth + half.root_depth[:, None])
    torch.testing.assert_close(half.joints, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half.keypoints_px, plain.keypoints_px, rtol=0, atol=2)

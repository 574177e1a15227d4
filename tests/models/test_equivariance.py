import numpy as np
import pytest
import torch
from torch import Tensor

from peclr_dali.models.config import EquivarianceConfig, Extent, Variant
from peclr_dali.models.equivariance import build_undo, undo_view

MAPS = 1000
POINTS = 64


def random_affine(count: int, seed: int = 0) -> Tensor:
    """Rotation, scale, shear and reflection, singular values in [0.4, 2.5]; v up to 15/128: (count, 2, 3)."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(count, 2, 2)))[0] for _ in range(2))
    linear = left * np.exp(rng.uniform(np.log(0.4), np.log(2.5), size=(count, 2)))[:, None] @ right
    return torch.from_numpy(np.concatenate([linear, rng.uniform(-15 / 128, 15 / 128, size=(count, 2, 1))], axis=2))


def similarity(angle_rad: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(N,), (N,), (N, 2) -> (N, 2, 3)."""
    cos, sin = scale * angle_rad.cos(), scale * angle_rad.sin()
    return torch.cat([torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2), shift[:, :, None]], dim=2)


def moved(points: Tensor, matrix: Tensor) -> Tensor:
    """A p of (N, m, 2)."""
    return torch.einsum("nij,nmj->nmi", matrix[:, :, :2], points)


def scalar_range(moved_points: Tensor, shift: Tensor) -> Tensor:
    """R with R = range over all numbers of (moved_points + shift R): (N,).

    The maximum lies on some axis a, the minimum on some b, so R is linear in itself for each of the four choices; the
    range is the largest of the four.
    """
    top, bottom = moved_points.amax(1), moved_points.amin(1)  # (N, 2)
    extent = top[:, :, None] - bottom[:, None, :]  # (N, a, b)
    return (extent / (1 - (shift[:, :, None] - shift[:, None, :]))).amax((1, 2))


@pytest.mark.parametrize("range_", ["axis", "scalar"])
def test_paper_restores_the_canonical_points_exactly(range_: Extent) -> None:
    matrix = random_affine(MAPS)
    points = torch.randn(MAPS, POINTS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    there = moved(points, matrix)
    shift = matrix[:, :, 2]  # (N, 2)
    extent = {"axis": there.amax(1) - there.amin(1), "scalar": scalar_range(there, shift)[:, None]}[range_]
    projection = (there + (shift * extent)[:, None]).flatten(1)  # (N, D)

    back = undo_view(projection, matrix, "paper", range_=range_)

    assert (back - points.flatten(1)).abs().max() < 1e-12
    assert (back - projection).abs().amax(1).min() > 1e-3  # there was something to undo


@pytest.mark.parametrize("variant", ["paper", "direct"])
def test_equals_a_loop_over_samples_and_points(variant: Variant) -> None:
    matrix = random_affine(5, seed=3)
    projection = torch.randn(5, 8, dtype=torch.float64)
    expected = np.empty((5, 8))
    for n in range(5):
        linear, shift = matrix[n, :, :2].numpy(), matrix[n, :, 2].numpy()
        points = projection[n].numpy().reshape(4, 2)
        extent = points.max(0) - points.min(0) if variant == "paper" else np.full(2, 128.0)
        for i, point in enumerate(points):
            expected[n, 2 * i : 2 * i + 2] = np.linalg.solve(linear, point - shift * extent)
    np.testing.assert_allclose(undo_view(projection, matrix, variant, output_side_px=128).numpy(), expected, atol=1e-11)


def test_upstream_equals_the_authors_procedure_written_as_a_loop() -> None:
    """OpenCV's rotation by minus the drawn angle about the mean, after the shift; both rows are normalised."""
    generator = torch.Generator().manual_seed(5)
    angle_deg = torch.rand(6, generator=generator, dtype=torch.float64) * 90 - 45
    jitter_px = torch.rand(6, 2, generator=generator, dtype=torch.float64) * 15  # of the source
    side_px, cut_out_px = 128, 90
    projection = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    # OpenCV turns counter-clockwise on the screen for positive angles: minus in our frame, where y points down.
    matrix = similarity(-angle_deg.deg2rad(), torch.full_like(angle_deg, side_px / cut_out_px), jitter_px / cut_out_px)

    expected = np.empty((6, 10))
    for n in range(6):
        points = (projection[n] / projection[n].norm()).numpy().reshape(5, 2)
        points = points - jitter_px[n].numpy() / side_px * (points.max(0) - points.min(0))
        (cx, cy), undo_rad = points.mean(0), np.deg2rad(-angle_deg[n].item())
        a, b = np.cos(undo_rad), np.sin(undo_rad)
        opencv = np.array([[a, b, (1 - a) * cx - b * cy], [-b, a, b * cx + (1 - a) * cy]])
        turned = np.concatenate([points, np.ones((5, 1))], axis=1) @ opencv.T
        expected[n] = turned.ravel() / np.linalg.norm(turned)

    back = undo_view(projection, matrix, "upstream", translation_scale=cut_out_px / side_px)
    np.testing.assert_allclose(back.numpy(), expected, atol=1e-12)

    # The step hands over the matrix from source pixels, whose scale is output side over cut-out.
    source_to_view = similarity(-angle_deg.deg2rad(), torch.full_like(angle_deg, side_px / cut_out_px), jitter_px)
    undo = build_undo(EquivarianceConfig(variant="upstream"), output_side_px=side_px)
    np.testing.assert_allclose(undo(projection, matrix, source_to_view).numpy(), expected, atol=1e-12)


def test_upstream_undoes_a_flip_about_the_mean() -> None:
    """Of a view that was flipped before it was rotated: what the same rotation gives, flipped back."""
    projection = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    angle_rad = torch.tensor([0.0, 0.4, 2.0, -3.0], dtype=torch.float64)
    matrix = similarity(angle_rad, 1 + angle_rad.abs(), torch.full((4, 2), 0.1, dtype=torch.float64))
    turned = undo_view(projection, matrix, "upstream").reshape(4, 3, 2)
    turned[..., 0] = 2 * turned[..., 0].mean(1, keepdim=True) - turned[..., 0]
    matrix[:, :, 0] *= -1
    torch.testing.assert_close(undo_view(projection, matrix, "upstream"), turned.flatten(1))


@pytest.mark.parametrize("variant", ["paper", "direct"])
def test_gradient(variant: Variant) -> None:
    matrix = random_affine(3)
    projection = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def undo(z: Tensor) -> Tensor:
        return undo_view(z, matrix, variant, detach_range=False, output_side_px=1)

    assert torch.autograd.gradcheck(undo, (projection,))


def test_detached_range_is_a_constant_to_the_gradient() -> None:
    matrix = random_affine(1)
    projection = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 6, dtype=torch.float64)
    (detached,) = torch.autograd.grad((undo_view(projection, matrix) * weight).sum(), projection)
    (linear_only,) = torch.autograd.grad(
        (undo_view(projection, matrix, "direct", output_side_px=0) * weight).sum(), projection
    )
    (through,) = torch.autograd.grad((undo_view(projection, matrix, detach_range=False) * weight).sum(), projection)
    torch.testing.assert_close(detached, linear_only)
    assert (through - detached).abs().max() > 1e-4


def test_build_undo_passes_every_setting() -> None:
    matrix, projection = random_affine(4).float(), torch.randn(4, 6)
    source_to_view = torch.randn(4, 2, 3)
    for config, expected in (
        (EquivarianceConfig(), undo_view(projection, matrix)),
        (EquivarianceConfig(range="scalar"), undo_view(projection, matrix, range_="scalar")),
        (EquivarianceConfig(variant="direct"), undo_view(projection, matrix, "direct", output_side_px=64)),
        (EquivarianceConfig(variant="none"), projection),
    ):
        assert torch.equal(build_undo(config, output_side_px=64)(projection, matrix, source_to_view), expected)


def test_a_matrix_that_is_not_finite_and_a_missing_side_are_named() -> None:
    with pytest.raises(ValueError, match="matrix has NaN or infinity"):
        undo_view(torch.ones(2, 4), random_affine(2) + torch.tensor([[0, 0, 0], [0, 0, float("nan")]]))
    with pytest.raises(ValueError, match='output_side_px = None: variant "direct" needs'):
        undo_view(torch.ones(2, 4), random_affine(2), "direct")

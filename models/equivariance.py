"""Undoes a view's geometric augmentation in latent space, which makes the contrastive loss equivariant (PeCLR, 3.2)."""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.models.config import EquivarianceConfig, Extent, Variant
from peclr_dali.models.tensor_checks import require_floats


def build_undo(config: EquivarianceConfig, output_side_px: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Build the function `undo(projection, matrix, source_to_view_px)` that the training step calls.

    `output_side_px` is L, the side of a view in pixels. Projections are (N, D), a view's `matrix` and
    `source_to_view_px` (N, 2, 3) each; the result is (N, D).
    """

    def undo(projection: Tensor, matrix: Tensor, source_to_view_px: Tensor) -> Tensor:
        translation_scale: Tensor | float = 1.0
        if config.variant == "upstream":  # the side of the source's cut-out over the output's
            translation_scale = _determinant(source_to_view_px[:, :, :2]).abs().rsqrt()  # (N,)
        return undo_view(
            projection,
            matrix,
            config.variant,
            range_=config.range,
            detach_range=config.detach_range,
            output_side_px=output_side_px,
            translation_scale=translation_scale,
        )

    return undo


def undo_view(
    projection: Tensor,
    matrix: Tensor,
    variant: Variant = "paper",
    *,
    range_: Extent = "axis",
    detach_range: bool = True,
    output_side_px: float | None = None,
    translation_scale: Tensor | float = 1.0,
) -> Tensor:
    """Map projections back to the canonical view.

    A projection of length D = 2m is m points in the plane, interleaved: (x_0, y_0, x_1, y_1, ...). A view is
    u -> A u + v on the canonical view, in units of the output side with the origin at its centre, x right, y down.

    - "paper": A^-1 (z - v * R), R the range of the sample's points (section 3.2 and supplement, "Normalizing
      translation"); rotation is about the latent origin. For R per axis this is the exact inverse of
      p -> A p + v * range(A p); for one R over all numbers it inverts p -> A p + v * R(z) with the R of the result.
    - "upstream": L2-normalised; shifted back by translation_scale * v * R, R per axis and detached; the rotation (and
      flip) in A undone about the mean of the sample's points, detached; L2-normalised. Scale is left to the cosine.
    - "direct": A^-1 (z - v L), v in pixels, not scaled to the latent range (supplement, Fig. "translation strategy").
    - "none": z.

    Args:
        projection: (N, D) float.
        matrix: (N, 2, 3), [A | v] of each sample; A invertible, for "upstream" a rotation, perhaps after a flip,
            times a positive factor (of any other A, the nearest such map is taken).
        variant: see above.
        range_: R per "axis", (N, 1, 2), or "scalar", (N, 1, 1). Only for "paper".
        detach_range: take no gradient through R. Only for "paper".
        output_side_px: L in pixels. Required for "direct", not used otherwise.
        translation_scale: (N,) or one number, only for "upstream": factor of the translation that the authors undo.
            They divide source pixels by the output side, so the factor is the side of the cut-out in source pixels over
            the output side in view pixels. 1 is the correct shift.

    Returns:
        (N, D), in the dtype of `projection`.

    Raises:
        TypeError: a tensor is none, or not of floats.
        ValueError: D is odd, the shapes do not fit, `matrix` is on a CPU and not finite, there is no such
            `variant` or `range_`, or "direct" lacks `output_side_px`.
    """
    require_floats("projection", projection, ("N", "D"))
    if projection.shape[1] % 2:
        raise ValueError(f"projection has shape {tuple(projection.shape)}, expected (N, D) with D even")
    require_floats("matrix", matrix, (len(projection), 2, 3))
    if matrix.device.type == "cpu" and not matrix.isfinite().all():  # a GPU would have to be waited for
        raise ValueError("matrix has NaN or infinity: a view's matrix is finite")
    for name, value, known in (("variant", variant, get_args(Variant)), ("range_", range_, get_args(Extent))):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: expected one of {', '.join(known)}")
    if variant == "none":
        return projection
    matrix = matrix.to(projection.dtype)
    linear, shift = matrix[:, :, :2], matrix[:, None, :, 2]  # (N, 2, 2), (N, 1, 2)
    if variant == "upstream":
        points = F.normalize(projection).reshape(len(projection), -1, 2)  # (N, m, 2)
        if isinstance(translation_scale, Tensor):
            require_floats("translation_scale", translation_scale, (len(projection),))
            translation_scale = translation_scale.to(points.dtype).view(-1, 1, 1)  # (N, 1, 1)
        points = points - translation_scale * shift * _range(points, "axis").detach()
        mean = points.mean(dim=1, keepdim=True).detach()  # (N, 1, 2)
        points = _map(_nearest_orthogonal(linear).mT, points - mean) + mean
        return F.normalize(points.flatten(1))
    points = projection.reshape(len(projection), -1, 2)  # (N, m, 2)
    if variant == "direct":
        if output_side_px is None:
            raise ValueError('output_side_px = None: variant "direct" needs a view\'s side in pixels')
        shift = shift * output_side_px
    else:
        extent = _range(points, range_)
        shift = shift * (extent.detach() if detach_range else extent)
    (a, b), (c, d) = linear[:, 0].unbind(1), linear[:, 1].unbind(1)
    adjugate = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2)
    return _map(adjugate / _determinant(linear)[:, None, None], points - shift).flatten(1)


def _range(points: Tensor, kind: Extent) -> Tensor:
    dims = (1,) if kind == "axis" else (1, 2)
    return points.amax(dims, keepdim=True) - points.amin(dims, keepdim=True)


# Written out, because torch.linalg.inv waits for the GPU and autocast would run a product of matrices in 16 bits.


def _map(linear: Tensor, points: Tensor) -> Tensor:
    """Apply matrices (N, 2, 2) to points (N, m, 2)."""
    x, y = points[..., 0], points[..., 1]  # (N, m)
    return torch.stack([linear[:, i, 0, None] * x + linear[:, i, 1, None] * y for i in range(2)], dim=-1)


def _determinant(linear: Tensor) -> Tensor:
    return linear[:, 0, 0] * linear[:, 1, 1] - linear[:, 0, 1] * linear[:, 1, 0]


def _nearest_orthogonal(linear: Tensor) -> Tensor:
    flip = _determinant(linear).sign()  # -1 of a flipped view, whose first column is negated here
    angle_rad = torch.atan2(flip * linear[:, 1, 0] - linear[:, 0, 1], flip * linear[:, 0, 0] + linear[:, 1, 1])  # (N,)
    cos, sin = angle_rad.cos(), angle_rad.sin()
    return torch.stack([flip * cos, -sin, flip * sin, cos], dim=1).view(-1, 2, 2)

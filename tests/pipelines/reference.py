"""The views in plain float64 NumPy: slow, short, and the oracle that the tests hold all renderers against.

From the product it takes only the description of its input: the names of the columns of the table of draws, and the
classes of the configuration. tests/test_structure.py checks this.
"""

import colorsys
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.views.augmentation import AppearanceConfig, ColourConfig, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw

Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
Image = npt.NDArray[np.uint8]

HALVE_BELOW = math.sqrt(0.5)
"""A view that shows the source at less than this size samples a halved source, and so on for each halving."""

MAX_HALVINGS = 6
"""At most; a view that needs more shows an image of 64 times its side."""


def view_matrices(
    box_px: FloatArray, size_px: tuple[int, int], draws: FloatArray, side_px: int, *, mirror: bool = False
) -> tuple[Array, Array]:
    """Augmentation and source-to-view matrix, both (2, 3), of one sample; frames as in pipelines/batch.py.

    Args:
        box_px: (3,) centre x, centre y, side; side 0 means the square around the whole image.
        size_px: height and width of the source.
        draws: (COLUMNS,) one row of the table of draws.
        side_px: side of the output.
        mirror: the canonical view shows the box left for right; the augmentation knows nothing of it.
    """
    height, width = size_px
    x, y, side = (float(v) for v in box_px)
    if side <= 0:
        x, y, side = width / 2, height / 2, max(height, width)
    angle, scale = math.radians(draws[Draw.ANGLE_DEG]), float(draws[Draw.MAGNIFICATION])
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    augmentation = np.array(
        [[cos, -sin, draws[Draw.SHIFT_X_FRAC]], [sin, cos, draws[Draw.SHIFT_Y_FRAC]]], dtype=np.float64
    )
    if draws[Draw.FLIP]:
        augmentation = augmentation @ np.diag([-1, 1, 1])
    if draws[Draw.CROP]:
        crop_x, crop_y, crop_side = draws[[Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC, Draw.CROP_SIDE_FRAC]].astype(np.float64)
        to_crop = np.array(
            [[1 / crop_side, 0, -crop_x / crop_side], [0, 1 / crop_side, -crop_y / crop_side], [0, 0, 1]]
        )
        augmentation = augmentation @ to_crop
    canonical = np.array([[1 / side, 0, -x / side], [0, 1 / side, -y / side], [0, 0, 1]])
    if mirror:
        canonical = np.diag([-1, 1, 1]) @ canonical
    to_pixels = np.array([[side_px, 0, side_px / 2], [0, side_px, side_px / 2], [0, 0, 1]])
    return augmentation, (to_pixels @ np.vstack([augmentation, [0, 0, 1]]) @ canonical)[:2]


def halve(image: Array, shrink: float, fill: int | str) -> tuple[Array, int]:
    """Halve (H, W, C) as often as a view that shows it `shrink` times as large needs: each time the mean of 2 x 2.

    Returns the image and how often it was halved.

    A view then samples the source at between 0.7 and 1.4 times its own pitch, as mip maps do. An odd last row or column
    is halved together with the fill beyond it. At least two whole pixels remain.
    """
    least, halvings = min(image.shape[:2]), 0
    while halvings < MAX_HALVINGS:
        if shrink >= HALVE_BELOW * 0.5**halvings or least // 2 ** (halvings + 1) < 2:
            break
        beyond = [(0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)]
        whole = np.pad(image, beyond, "edge") if fill == "edge" else np.pad(image, beyond, constant_values=float(fill))
        image = (whole[::2, ::2] + whole[1::2, ::2] + whole[::2, 1::2] + whole[1::2, 1::2]) / 4
        halvings += 1
    return image, halvings


def warp(image: Array, matrix_px: Array, side_px: int, fill: int | str) -> Array:
    """Bilinear warp of (H, W, C) by the (2, 3) source-to-view matrix: (side, side, C)."""
    height, width, _ = image.shape
    inverse = np.linalg.inv(np.vstack([matrix_px, [0, 0, 1]]))[:2]
    center = np.arange(side_px) + 0.5
    grid = np.stack([*np.meshgrid(center, center), np.ones((side_px, side_px))], axis=-1)  # (side, side, 3)
    x, y = np.moveaxis(grid @ inverse.T - 0.5, -1, 0)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    out = np.zeros((side_px, side_px, image.shape[2]))
    for dy in (0, 1):
        for dx in (0, 1):
            weight = np.where(dx, x - left, 1 - (x - left)) * np.where(dy, y - top, 1 - (y - top))
            column, row = left + dx, top + dy
            value = image[np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]
            if fill != "edge":
                inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                value = np.where(inside[..., None], value, float(fill))
            out += weight[..., None] * value
    return out


def jitter(image: Array, colour: ColourConfig, draws: FloatArray) -> Array:
    """Colour jitter of (..., 3) pixels in [0, 255], not yet rounded."""
    hue, saturation = float(draws[Draw.HUE]), float(draws[Draw.SATURATION])
    scale, shift = float(draws[Draw.VALUE_SCALE]), float(draws[Draw.VALUE_SHIFT])
    if colour.jitter == "none":
        return image
    out = np.empty_like(image)
    for at in np.ndindex(image.shape[:-1]):
        h, s, v = colorsys.rgb_to_hsv(*(image[at] / 255))
        out[at] = colorsys.hsv_to_rgb(h * hue, s * saturation, min(1.0, v * scale + shift / 255))
    return out * 255


GREY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in a grey (ITU-R BT.601, as OpenCV's)."""


def sobel(view: Array) -> Array:
    """Length of the 3 x 3 Sobel gradient of the grey of (S, S, 3), mirrored at its border: (S, S, 1)."""
    grey = np.pad(view @ GREY, 1, mode="reflect")
    across, down = grey[:, 2:] - grey[:, :-2], grey[2:] - grey[:-2]  # (S + 2, S), (S, S + 2)
    x = across[:-2] + 2 * across[1:-1] + across[2:]
    return np.asarray(np.hypot(x, down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:])[..., None])


def cut_out(view: Array, left_px: int, top_px: int, cut_px: int, grey: float) -> Array:
    """(S, S, 3) with a square of one grey."""
    out = view.copy()
    out[top_px : top_px + cut_px, left_px : left_px + cut_px] = grey
    return out


def blur(view: Array, sigma_px: float) -> Array:
    """(S, S, 3) through a normalised Gaussian that ends at ceil(3 sigma), mirrored at its border."""
    radius = math.ceil(3 * sigma_px)
    taps = np.exp(-((np.arange(-radius, radius + 1) / sigma_px) ** 2) / 2)
    taps /= taps.sum()
    side = len(view)
    wide = np.pad(view, [(radius, radius), (radius, radius), (0, 0)], mode="reflect")
    down = sum(tap * wide[shift : shift + side] for shift, tap in enumerate(taps))
    return np.asarray(sum(tap * down[:, shift : shift + side] for shift, tap in enumerate(taps)))


def noise(view: Array, key: int, std: float) -> Array:
    """(S, S, 3) plus noise in whole levels: the quantile of a normal distribution that a hash of the pixel picks.

    The hash of a pixel's number is mixed with the view's 32-bit key, and hashed again; its upper 12 bits pick one of
    4096 quantiles.
    """
    pixel = np.arange(view.size, dtype=np.uint64).reshape(view.shape)
    picked = _hash32(_hash32(pixel) ^ np.uint64(key)) >> np.uint64(20)
    normal = NormalDist(0, 1)
    quantiles = np.array([normal.inv_cdf((number + 0.5) / 4096) for number in range(4096)])
    return np.asarray(view + np.rint(std * quantiles)[picked])


def _hash32(number: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 32-bit numbers that flips about half of the bits of the result for each bit of the argument."""
    low = np.uint64(0xFFFFFFFF)
    number = (number ^ (number >> np.uint64(16))) * np.uint64(0x7FEB352D) & low
    number = (number ^ (number >> np.uint64(15))) * np.uint64(0x846CA68B) & low
    return number ^ (number >> np.uint64(16))


def apply_appearance(view: Image, appearance: AppearanceConfig, draws: FloatArray) -> Image:
    """The further augmentations of one view (S, S, 3), each giving 8-bit pixels."""
    left_px, top_px, cut_px = (
        int(draws[column]) for column in (Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX, Draw.CUT_OUT_SIDE_PX)
    )
    key = int(draws[Draw.NOISE_KEY_HIGH]) << 16 | int(draws[Draw.NOISE_KEY_LOW])
    augmentations: dict[Draw, Callable[[Array], Array]] = {
        Draw.SOBEL: sobel,
        Draw.CUT_OUT: lambda view: cut_out(view, left_px, top_px, cut_px, float(draws[Draw.CUT_OUT_GREY])),
        Draw.BLUR: lambda view: blur(view, float(draws[Draw.BLUR_SIGMA_PX])),
        Draw.NOISE: lambda view: noise(view, key, appearance.noise_std),
        Draw.COLOUR_DROP: lambda view: (view @ GREY)[..., None],
    }
    for column, augment in augmentations.items():
        if draws[column]:
            changed = np.clip(np.rint(augment(view.astype(np.float64))), 0, 255).astype(np.uint8)
            view = np.broadcast_to(changed, view.shape)
    return view


def warp_view(
    image: Image, box_px: FloatArray, draws: FloatArray, geometry: GeometryConfig, *, mirror: bool = False
) -> Array:
    """One view (side, side, 3) of a decoded RGB image (H, W, 3) before its colours are jittered, not rounded."""
    _, matrix_px = view_matrices(box_px, image.shape[:2], draws, geometry.side_px, mirror=mirror)
    source = image.astype(np.float64)
    if geometry.antialias:
        source, halvings = halve(source, math.sqrt(abs(np.linalg.det(matrix_px[:, :2]))), geometry.fill)
        matrix_px = matrix_px @ np.diag([2**halvings, 2**halvings, 1])
    return warp(source, matrix_px, geometry.side_px, geometry.fill)


def make_view(
    image: Image,
    box_px: FloatArray,
    draws: FloatArray,
    geometry: GeometryConfig,
    colour: ColourConfig,
    appearance: AppearanceConfig,
    *,
    mirror: bool,
) -> Image:
    """One view (side, side, 3) uint8 of a decoded RGB image (H, W, 3)."""
    warped = warp_view(image, box_px, draws, geometry, mirror=mirror)
    jittered = np.clip(np.rint(jitter(warped, colour, draws)), 0, 255).astype(np.uint8)
    return apply_appearance(jittered, appearance, draws)

"""The kernel of the CPU's fast path: halves, warps and jitters many images in compiled code.

It halves as planned in views/plan.py, samples bilinearly and jitters in HSV. It works row by row in small
buffers, with loops that the compiler can vectorise. Numba compiles it at first use and keeps the result on disk. Images
are passed as addresses, since images of different sizes form no array.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import BoolArray, FloatArray, Int32Array, IntArray

PaddedImage = Int32Array
"""An image with a border of one pixel of fill: (H + 2) * (W + 2) numbers red + 256 green + 65536 blue."""

F, I32, I64 = np.float32, np.int32, np.int64

compiled = cached(numba.njit, nogil=True, fastmath=True, error_model="numpy")
"""Compiles a function for this machine; the result is cached on disk and runs without the GIL."""


@intrinsic  # type: ignore[untyped-decorator]
def _load_eight(_context: Any, address: Any) -> Any:
    """The eight bytes at an address, which need not be aligned, as an int64."""

    def code(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _store_four(_context: Any, address: Any, value: Any) -> Any:
    """Write an int32 to an address, which need not be aligned."""

    def code(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()), align=1)
        return arguments[0]

    return types.int64(types.int64, types.int32), code


@compiled
def _pad(address: int, height: int, width: int, out: PaddedImage) -> None:
    """Copy the RGB image (height, width, 3) at `address`, of at least eight bytes, inside the border of `out`."""
    last = address + 3 * height * width - 8
    for y in range(height):
        row = address + 3 * width * y
        to = out[(width + 2) * (y + 1) + 1 : (width + 2) * (y + 2) - 1]
        inside = max(0, min(width, (last - row) // 3 + 1))  # pixels from which eight bytes lie inside the image
        for x in range(inside):
            to[x] = I32(_load_eight(row + 3 * x) & I64(0xFFFFFF))
        for x in range(inside, width):
            to[x] = I32((_load_eight(last) >> (I64(8) * (row + 3 * x - last))) & I64(0xFFFFFF))


@compiled
def _halve(image: PaddedImage, height: int, width: int, out: PaddedImage) -> None:
    """Halve a padded image: rounded mean of 2 x 2 pixels; an odd last row or column is averaged with the border."""
    apart, byte = I32(0x00FF00FF), I32(255)  # red and blue have enough bits between them for the sum of four
    half_width = (width + 1) // 2
    for y in range((height + 1) // 2):
        upper = image[(width + 2) * (2 * y + 1) + 1 : (width + 2) * (2 * y + 2)]
        lower = image[(width + 2) * (2 * y + 2) + 1 : (width + 2) * (2 * y + 3)]
        to = out[(half_width + 2) * (y + 1) + 1 : (half_width + 2) * (y + 2)]
        for x in range(half_width):
            a, b, c, d = upper[2 * x], upper[2 * x + 1], lower[2 * x], lower[2 * x + 1]
            red_blue = (a & apart) + (b & apart) + (c & apart) + (d & apart) + I32(0x00020002)
            a, b, c, d = a >> I32(8), b >> I32(8), c >> I32(8), d >> I32(8)
            green = (a & byte) + (b & byte) + (c & byte) + (d & byte) + I32(2)
            to[x] = (red_blue >> I32(2)) & apart | (green >> I32(2)) << I32(8)


@compiled
def _fill_border(image: PaddedImage, height: int, width: int, grey: int, edge: bool) -> None:
    """Set the border of a padded image to a grey, or to the nearest pixels of the image."""
    stride, below = width + 2, (width + 2) * (height + 1)
    for x in range(1, width + 1):
        image[x] = image[stride + x] if edge else I32(grey * 0x010101)
        image[below + x] = image[below - stride + x] if edge else I32(grey * 0x010101)
    for y in range(height + 2):
        left, right = stride * y, stride * y + width + 1
        image[left] = image[left + 1] if edge else I32(grey * 0x010101)
        image[right] = image[right - 1] if edge else I32(grey * 0x010101)


@compiled
def _byte(pixel: Any, shift: int) -> Any:
    """One colour of a pixel as float32. Numba computes in int64 unless every step has an explicit type."""
    return F(I32(I32(pixel >> I32(shift)) & I32(255)))


@compiled
def _make_view(
    image: PaddedImage,
    height: int,
    width: int,
    matrix: FloatArray,
    jitter: bool,
    colour: FloatArray,
    side: int,
    out: int,
) -> None:
    """Make one view of a padded image at the address `out`; the other arguments are as in `make_views`."""
    stride = I32(width + 2)
    below_one = F(1 - 2.0**-23)  # keeps the right and lower neighbour inside
    right, bottom = F(width + 1) * below_one, F(height + 1) * below_one
    m0, m1, m2, m3, m4, m5 = matrix[0], matrix[1], matrix[2], matrix[3], matrix[4], matrix[5]
    hue, saturation, scale, shift = colour[0], colour[1], colour[2], colour[3]
    address = I64(image.ctypes.data)
    upper, lower, at = np.empty(side, I64), np.empty(side, I64), np.empty(side, I32)
    upper_left, upper_right = np.empty(side, I32), np.empty(side, I32)
    lower_left, lower_right = np.empty(side, I32), np.empty(side, I32)
    across, down = np.empty(side, F), np.empty(side, F)
    red, green, blue, packed = np.empty(side, F), np.empty(side, F), np.empty(side, F), np.empty(side, I32)
    for y in range(side):
        start_x, start_y = m1 * F(y) + m2, m4 * F(y) + m5
        for x in range(side):
            source_x = min(max(m0 * F(I32(x)) + start_x, F(0)), right)  # beyond this there is only border
            source_y = min(max(m3 * F(I32(x)) + start_y, F(0)), bottom)
            column, row = I32(source_x), I32(source_y)
            across[x], down[x] = source_x - F(column), source_y - F(row)
            at[x] = row * stride + column
        for x in range(side):  # two neighbours at once
            here = address + I64(at[x]) * I64(4)
            upper[x] = _load_eight(here)
            lower[x] = _load_eight(here + I64(4) * I64(stride))
        for x in range(side):  # a loop of its own, since a loop with an int64 handles half as many pixels at once
            upper_left[x], upper_right[x] = I32(upper[x]), I32(upper[x] >> I64(32))
            lower_left[x], lower_right[x] = I32(lower[x]), I32(lower[x] >> I64(32))
        for x in range(side):
            a, b, c, d = upper_left[x], upper_right[x], lower_left[x], lower_right[x]
            wd = across[x] * down[x]
            wb, wc = across[x] - wd, down[x] - wd
            wa = F(1) - across[x] - wc
            red[x] = _byte(a, 0) * wa + _byte(b, 0) * wb + _byte(c, 0) * wc + _byte(d, 0) * wd
            green[x] = _byte(a, 8) * wa + _byte(b, 8) * wb + _byte(c, 8) * wc + _byte(d, 8) * wd
            blue[x] = _byte(a, 16) * wa + _byte(b, 16) * wb + _byte(c, 16) * wc + _byte(d, 16) * wd
        if jitter:
            for x in range(side):
                r, g, b = red[x], green[x], blue[x]
                value = max(r, max(g, b))
                chroma = value - min(r, min(g, b))
                is_red, is_green = r >= value, g >= value
                numerator = (g - b) if is_red else ((b - r) if is_green else (r - g))
                offset = (F(0) if g >= b else F(6)) if is_red else (F(2) if is_green else F(4))
                some_value, some_chroma = max(value, F(1e-6)), max(chroma, F(1e-6))
                inverse = F(1) / (some_value * some_chroma)  # one division for two
                sixths = (numerator * inverse * some_value + offset) * hue
                new_value = max(F(0), min(value * scale + shift, F(255)))
                new_chroma = new_value * saturation * chroma * inverse * some_chroma
                k = F(5) + sixths
                k = k - F(6) if k >= F(6) else k
                red[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
                k = F(3) + sixths
                k = k - F(6) if k >= F(6) else k
                green[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
                k = F(1) + sixths
                k = k - F(6) if k >= F(6) else k
                blue[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
        for x in range(side):  # four bytes per pixel, since three do not vectorise; all values lie in [0, 255]
            packed[x] = I32(red[x] + F(0.5)) | I32(green[x] + F(0.5)) << I32(8) | I32(blue[x] + F(0.5)) << I32(16)
        row_out = I64(out) + I64(3) * side * y
        for x in range(side - 1):  # each pixel overwrites the empty fourth byte of the one before
            _store_four(row_out + I64(3) * x, packed[x])
        # Four bytes would not fit at the last pixel of a row, so they start one byte earlier, in the pixel before.
        _store_four(row_out + I64(3) * side - I64(4), packed[side - 1] << I32(8) | packed[side - 2] >> I32(16))


@compiled
def make_views(
    addresses: IntArray,
    sizes_px: IntArray,
    rows: IntArray,
    halvings: IntArray,
    view_to_source: FloatArray,
    jitters: BoolArray,
    colours: FloatArray,
    fill: int,
    edge: bool,
    sides: IntArray,
    out_addresses: IntArray,
    first: int,
    step: int,
) -> None:
    """Make the views of images `first`, `first + step`, ... of M: sample bilinearly, then jitter.

    Args:
        addresses: (M,) of the first byte of each RGB image, without gaps between its rows, at least eight bytes.
        sizes_px: (M, 2) heights and widths.
        rows: (V, M) the row of each view that shows the image; -1 if none does.
        halvings: (V, N) how often the image is halved for each view.
        view_to_source: (V, N, 6) row-major 2 x 3 matrices from view pixels to pixels of the halved and padded image,
            the centre of the first pixel being 0, 0 in both.
        jitters: (V,) whether to apply `colours`.
        colours: (V, N, 4) factors of hue, saturation and value, and the number added to the value, in 8-bit units.
        fill: grey value outside the image.
        edge: repeat the border outside instead of `fill`.
        sides: (V,) S, side of each view in pixels, at least 2.
        out_addresses: (V,) of each view's (N, S, S, 3) uint8 pixels.
    """
    image, other = np.empty(0, I32), np.empty(0, I32)
    for m in range(first, len(addresses), step):
        height, width, halved = sizes_px[m, 0], sizes_px[m, 1], 0
        if len(image) < (height + 2) * (width + 2):
            image, other = np.empty((height + 2) * (width + 2), I32), np.empty((height + 2) * (width + 2), I32)
        _pad(addresses[m], height, width, image)
        most = I64(0)
        for view in range(len(rows)):
            if rows[view, m] >= 0:
                most = max(most, halvings[view, rows[view, m]])
        for level in range(most + 1):
            if halved < level:
                _halve(image, height, width, other)
                image, other, height, width, halved = other, image, (height + 1) // 2, (width + 1) // 2, level
            _fill_border(image, height, width, fill, edge)
            for view in range(len(rows)):
                n = rows[view, m]
                if n >= 0 and halvings[view, n] == level:
                    side, matrix, colour = sides[view], view_to_source[view, n], colours[view, n]
                    out = out_addresses[view] + 3 * side * side * n
                    _make_view(image, height, width, matrix, jitters[view], colour, side, out)

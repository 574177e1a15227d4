"""The one kernel of our own on the CPU's fast path: halve, warp and jitter, for many images without Python in between.

It is the arithmetic of `pipelines.reference`, in rows over small buffers, each loop simple enough for the compiler to
vectorise. Numba compiles it at first use and keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

Image = npt.NDArray[np.uint8]
Function = TypeVar("Function", bound=Callable[..., object])

F, I32, I64, U32 = np.float32, np.int32, np.int64, np.uint32
_BYTES_READ = 8
"""The kernel reads two neighbouring pixels at once, six bytes, as eight."""


def compiled(function: Function) -> Function:
    """Compile for this machine, once; the result is cached on disk and runs without Python's lock."""
    result: Function = numba.njit(nogil=True, fastmath=True, error_model="numpy", cache=True)(function)
    return result


@intrinsic  # type: ignore[untyped-decorator]
def _load_eight(_context: Any, address: Any) -> Any:
    """The eight bytes at an address, which need not be aligned, as an int64."""

    def code(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _store_four(_context: Any, address: Any, value: Any) -> Any:
    """Write an int32 to an address, which need not be aligned."""

    def code(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int32), code


@compiled
def _halve(address: int, height: int, width: int, out: Image) -> None:
    """Mean of 2 x 2 pixels, rounded; of an odd size the last row or column is left out.

    Args:
        address: of the RGB image's first byte.
        height: of the image, in pixels.
        width: likewise.
        out: room for the (height // 2, width // 2, 3) result and eight bytes; may lie where the image lies.
    """
    last = address + 3 * height * width - 8
    at = 0
    low = I64(0x00FF00FF00FF00FF)
    for y in range(height // 2):
        for x in range(width // 2):
            here = address + 3 * (2 * y * width + 2 * x)
            upper = _load_eight(here)
            below = min(here + 3 * width, last)
            lower = _load_eight(below) >> I64(8 * (here + 3 * width - below))
            even = (upper & low) + (lower & low)  # red and blue of the left pixel, green of the right one
            odd = ((upper >> I64(8)) & low) + ((lower >> I64(8)) & low)  # green; red and blue of the right one
            red = (even + (odd >> I64(16)) + 2) >> I64(2)
            green = (odd + (even >> I64(32)) + 2) >> I64(2)
            blue = ((even >> I64(16)) + (odd >> I64(32)) + 2) >> I64(2)
            out[at], out[at + 1], out[at + 2] = np.uint8(red), np.uint8(green), np.uint8(blue)
            at += 3


@compiled
def _make_view(
    address: int,
    height: int,
    width: int,
    matrix: npt.NDArray[np.float32],
    jitter: bool,
    colour: npt.NDArray[np.float32],
    fill: np.float32,
    edge: bool,
    side: int,
    out: int,
) -> None:
    """Make one view of the image at `address`, at the address `out`; the other arguments are as in `make_views`."""
    upper, lower = np.empty(side, I64), np.empty(side, I64)
    across, down, pixel = np.empty(side, F), np.empty(side, F), np.empty(side, I32)
    red, green, blue = np.empty(side, F), np.empty(side, F), np.empty(side, F)
    packed = np.empty(side, I32)
    hue, saturation, scale, shift = colour[0], colour[1], colour[2], colour[3]
    m0, m1, m2, m3, m4, m5 = matrix[0], matrix[1], matrix[2], matrix[3], matrix[4], matrix[5]
    last = address + 3 * height * width - _BYTES_READ
    right_edge, bottom_edge = F(width - 1), F(height - 1)
    for y in range(side):
        start_x, start_y = m1 * F(y) + m2, m4 * F(y) + m5
        for x in range(side):
            at_x, at_y = m0 * F(I32(x)) + start_x, m3 * F(I32(x)) + start_y
            if edge:
                at_x, at_y = min(max(at_x, F(0)), right_edge), min(max(at_y, F(0)), bottom_edge)
            # The nearest pair of neighbours inside; further out they get no weight.
            column = I32(min(max(at_x, F(0)), right_edge - F(1)))
            row = I32(min(max(at_y, F(0)), bottom_edge - F(1)))
            pixel[x] = row * I32(width) + column
            across[x], down[x] = at_x - F(column), at_y - F(row)
        for x in range(side):
            here = address + 3 * I64(pixel[x])
            below = min(here + 3 * width, last)  # not beyond the image's end
            upper[x] = _load_eight(here)
            lower[x] = _load_eight(below) >> (I64(8) * (here + 3 * width - below))
        for x in range(side):
            a, b = I32(upper[x]), I32(upper[x] >> I64(24))
            c, d = I32(lower[x]), I32(lower[x] >> I64(24))
            left, right = max(F(0), F(1) - abs(across[x])), max(F(0), F(1) - abs(across[x] - F(1)))
            top, bottom = max(F(0), F(1) - abs(down[x])), max(F(0), F(1) - abs(down[x] - F(1)))
            wa, wb, wc, wd = left * top, right * top, left * bottom, right * bottom
            outside = fill * (F(1) - wa - wb - wc - wd)
            m = I32(255)
            red[x] = F(a & m) * wa + F(b & m) * wb + F(c & m) * wc + F(d & m) * wd + outside
            a, b, c, d = a >> I32(8), b >> I32(8), c >> I32(8), d >> I32(8)
            green[x] = F(a & m) * wa + F(b & m) * wb + F(c & m) * wc + F(d & m) * wd + outside
            a, b, c, d = a >> I32(8), b >> I32(8), c >> I32(8), d >> I32(8)
            blue[x] = F(a & m) * wa + F(b & m) * wb + F(c & m) * wc + F(d & m) * wd + outside
        if jitter:
            for x in range(side):
                r, g, b = red[x], green[x], blue[x]
                value = max(r, max(g, b))
                chroma = value - min(r, min(g, b))
                is_red, is_green = r >= value, g >= value
                numerator = (g - b) if is_red else ((b - r) if is_green else (r - g))
                offset = (F(0) if g >= b else F(6)) if is_red else (F(2) if is_green else F(4))
                sixths = (numerator / max(chroma, F(1e-6)) + offset) * hue
                new_value = max(F(0), min(value * scale + shift, F(255)))
                new_chroma = new_value * saturation * chroma / max(value, F(1e-6))
                k = F(5) + sixths
                k = k - F(6) if k >= F(6) else k
                red[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
                k = F(3) + sixths
                k = k - F(6) if k >= F(6) else k
                green[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
                k = F(1) + sixths
                k = k - F(6) if k >= F(6) else k
                blue[x] = new_value - new_chroma * max(F(0), min(F(1), min(k, F(4) - k)))
        for x in range(side):  # all values lie in [0, 255]
            packed[x] = I32(red[x] + F(0.5)) | I32(green[x] + F(0.5)) << I32(8) | I32(blue[x] + F(0.5)) << I32(16)
        row_out = out + 3 * side * y
        for x in range(side - 1):  # each overwrites the empty fourth byte of the one before
            _store_four(row_out + 3 * x, packed[x])
        # The last pixel of a row has no byte to spare: it comes with the end of the one before it.
        _store_four(row_out + 3 * side - 4, packed[side - 1] << I32(8) | (packed[side - 2] >> I32(16)))


@compiled
def make_views(
    addresses: npt.NDArray[np.int64],
    sizes_px: npt.NDArray[np.int64],
    halvings: npt.NDArray[np.int64],
    view_to_source: npt.NDArray[np.float32],
    jitter: bool,
    colours: npt.NDArray[np.float32],
    fill: np.float32,
    edge: bool,
    side: int,
    out_addresses: npt.NDArray[np.int64],
    first: int,
    step: int,
) -> None:
    """Make the views of images `first`, `first + step`, ... of N: sample bilinearly, then jitter.

    Args:
        addresses: (N,) of the first byte of each RGB image, rows without gaps, at least 2 x 2 pixels and eight bytes.
        sizes_px: (N, 2) heights and widths.
        halvings: (V, N) how often the image is halved for each view.
        view_to_source: (V, N, 6) row-major 2 x 3 matrices from view pixels to pixels of the halved image, the centre of
            the first pixel being 0, 0 in both.
        jitter: whether to apply `colours`.
        colours: (V, N, 4) factors of hue and saturation, factor of the value and what is added to it, in 8-bit units.
        fill: grey of what lies outside.
        edge: repeat the border outside, instead.
        side: S, side of a view in pixels.
        out_addresses: (V,) of each view's (N, S, S, 3) uint8 pixels.
        first: see above.
        step: see above.
    """
    small = np.empty(0, np.uint8)
    for n in range(first, len(addresses), step):
        address, height, width = addresses[n], sizes_px[n, 0], sizes_px[n, 1]
        halved = 0
        for turn in range(len(out_addresses)):  # views of fewer halvings first: each halving is made once
            view = turn if len(out_addresses) != 2 or halvings[0, n] <= halvings[1, n] else 1 - turn
            if halved > halvings[view, n]:
                address, height, width, halved = addresses[n], sizes_px[n, 0], sizes_px[n, 1], 0
            while halved < halvings[view, n]:
                if len(small) < 3 * (height // 2) * (width // 2) + _BYTES_READ:
                    small = np.empty(3 * (height // 2) * (width // 2) + _BYTES_READ, np.uint8)
                _halve(address, height, width, small)
                address, height, width, halved = I64(small.ctypes.data), height // 2, width // 2, halved + 1
            out = out_addresses[view] + 3 * side * side * n
            _make_view(address, height, width, view_to_source[view, n], jitter, colours[view, n], fill, edge, side, out)

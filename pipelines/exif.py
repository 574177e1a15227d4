"""What Exif data asks of a decoder, and whether every reader would see the same.

Behind DALI 2.4's decoder a PNG's Exif data is read twice: by nvImageCodec, which sizes the output, and by OpenCV, which
decodes and turns the image. nvImageCodec forgets an orientation that stands before damage and takes the last of several
blocks; OpenCV keeps it and takes the first. Where they differ a 72 x 56 image is written into 56 x 72 and over the
memory behind.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_BYTE_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">"}
_ENTRY_BYTES: Final = 12
_ORIENTATION: Final = 0x0112
_TURNS: Final = range(2, 9)
# The tags whose values the readers follow out of the directory: texts, and how many rational numbers of 8 bytes.
_TEXTS: Final = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298)
_RATIONALS: Final = {0x011A: 1, 0x011B: 1, 0x013E: 2, 0x013F: 6, 0x0211: 3, 0x0214: 6}


class ExifFacts(NamedTuple):
    """What a block of Exif data says."""

    turns: bool
    """Whether an entry within reach asks for another orientation than the stored one."""

    whole: bool
    """Whether the first directory and the values that readers follow lie inside the block."""


def read_exif(block: bytes) -> ExifFacts:
    """Read the first directory of a block of Exif data.

    Args:
        block: from the byte order mark on. Readers pass over a block that begins otherwise, so it asks for nothing.
    """
    order = _BYTE_ORDERS.get(block[:4])
    if order is None:
        return ExifFacts(turns=False, whole=True)
    if len(block) < 8:
        return ExifFacts(turns=False, whole=False)
    directory = struct.unpack_from(order + "I", block, 4)[0]
    if directory + 2 > len(block):
        return ExifFacts(turns=False, whole=False)
    turns, whole = False, True
    for entry in range(struct.unpack_from(order + "H", block, directory)[0]):
        at = directory + 2 + _ENTRY_BYTES * entry
        if at + _ENTRY_BYTES > len(block):
            return ExifFacts(turns or _turns(block, at, order), whole=False)
        turns |= _turns(block, at, order)
        tag, _, count, offset = struct.unpack_from(order + "HHII", block, at)
        reach = 8 * _RATIONALS.get(tag, 0) or (count if tag in _TEXTS and count > 4 else 0)
        whole &= not reach or offset + reach <= len(block)
    return ExifFacts(turns, whole)


def _turns(block: bytes, at: int, order: str) -> bool:
    """Whether the entry at a byte, of which ten bytes suffice, asks for a turn."""
    if at + 10 > len(block):
        return False
    tag, value = struct.unpack_from(order + "H6xH", block, at)
    return tag == _ORIENTATION and value in _TURNS

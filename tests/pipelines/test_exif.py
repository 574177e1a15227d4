"""Exif data in PNG and WebP files, against the two readers behind DALI's decoder.

A square image may be turned by one of them only without harm to memory, so that the test sees what the check must stop.
"""

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import DALIDataType, DALIImageType
from PIL import Image

from pipelines.exif import read_exif
from pipelines.files import BadImage, check_image

SIDE = 64
ORIENTATION, DESCRIPTION, X_RESOLUTION = 0x0112, 0x010E, 0x011A
WebpChunk = tuple[bytes, bytes]


def exif_of(
    *entries: tuple[int, int, int], order: str = ">", count: int | None = None, directory: int = 8, behind: int = 16
) -> bytes:
    """A block of Exif data: entries of (tag, count, value), a directory that says `count`, and bytes behind it."""
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", directory)
    count = len(entries) if count is None else count
    body = b"".join(
        struct.pack(order + "HHI", tag, 3 if tag == ORIENTATION else 2, many)
        + (struct.pack(order + "HH", value & 0xFFFF, 0) if tag == ORIENTATION else struct.pack(order + "I", value))
        for tag, many, value in entries
    )
    return start + struct.pack(order + "H", count) + body + bytes(behind)


def turning(value: int = 6) -> tuple[int, int, int]:
    return ORIENTATION, 1, value


def striped(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Bright above, dark below: once turned by 90 degrees, the first row is not of one brightness."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2] = 200
    return pixels


def png(before: Sequence[bytes], after: Sequence[bytes] = (), height: int = SIDE) -> bytes:
    """A PNG with blocks of Exif data before and after its pixels."""
    rows = b"".join(b"\0" + row.tobytes() for row in striped(SIDE, height))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, height, 8, 2, 0, 0, 0)),
        *((b"eXIf", block) for block in before),
        (b"IDAT", zlib.compress(rows)),
        *((b"eXIf", block) for block in after),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def webp(*behind: WebpChunk, announced: bool = True, height: int = SIDE, odd: bool = False) -> bytes:
    """An extended WebP with chunks behind its image, which is of an odd length if it shall."""
    file = io.BytesIO()
    Image.fromarray(striped(SIDE, height)).save(file, "WEBP")
    image = file.getvalue()[20:]
    image = image[: len(image) - len(image) % 2] + (b"\0" if odd else b"")
    canvas = bytes([8 * announced, 0, 0, 0]) + struct.pack("<I", SIDE - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        for kind, data in ((b"VP8X", canvas), (b"VP8 ", image), *behind)
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def decoder_turns(file: bytes) -> bool:
    return len(np.unique(run_dali(file, peek=False)[2, :, 0] > 100)) == 2


def parser_turns(file: bytes) -> bool:
    """Of a file of half the height."""
    return bool(run_dali(file, peek=True)[0] == SIDE)


def run_dali(file: bytes, *, peek: bool) -> npt.NDArray[np.uint8]:
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(source=lambda: [np.frombuffer(file, np.uint8)], dtype=DALIDataType.UINT8)
        pipeline.set_outputs(
            fn.peek_image_shape(encoded)
            if peek
            else fn.decoders.image(encoded, device="cpu", output_type=DALIImageType.RGB)
        )
    return np.array(pipeline.run()[0].at(0))


def passes(file: bytes) -> bool:
    try:
        check_image(file)
    except BadImage:
        return False
    return True


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from((ORIENTATION, ORIENTATION, DESCRIPTION, X_RESOLUTION, 0x0213, 0x8769)),
        st.sampled_from((0, 1, 4, 5, 20, 2**31)),
        st.sampled_from((0, 1, 5, 6, 8, 9, 40, 2**31)),
    ),
    max_size=3,
)
BLOCKS = st.builds(
    lambda entries, order, count, directory, behind, cut: exif_of(
        *entries, order=order, count=count, directory=directory, behind=behind
    )[: -cut or None],
    ENTRIES,
    st.sampled_from("<>"),
    st.sampled_from((None, None, 0, 1, 2, 9, 0xFFFF)),
    st.sampled_from((8, 8, 8, 0, 60, 2**31)),
    st.integers(0, 24),
    st.sampled_from((0, 0, 1, 3, 9, 30)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(BLOCKS, max_size=2), st.lists(BLOCKS, max_size=1))
@example([exif_of(turning())], [])
@example([], [exif_of(turning())])
@example([exif_of(turning(), (DESCRIPTION, 20, 2**31))], [])
def test_both_readers_turn_what_passes_alike(before: list[bytes], after: list[bytes]) -> None:
    if passes(png(before, after)):
        assert decoder_turns(png(before, after)) == parser_turns(png(before, after, height=SIDE // 2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([exif_of(turning(1)), exif_of(turning(6))], []),
        ([exif_of(turning(6)), exif_of(turning(1))], []),
        ([exif_of(turning(1))], [exif_of(turning(6))]),
        ([exif_of(turning(), count=9, behind=4)], []),
        ([exif_of(turning(), (DESCRIPTION, 20, 2**30))], []),
        ([exif_of(turning(), (X_RESOLUTION, 1, 2**30))], []),
    ],
)
def test_png_that_the_readers_turn_differently_is_stopped(before: list[bytes], after: list[bytes]) -> None:
    assert decoder_turns(png(before, after)) != parser_turns(png(before, after, height=SIDE // 2))
    with pytest.raises(BadImage, match="PNG with an orientation in damaged or repeated Exif data"):
        check_image(png(before, after))


@pytest.mark.parametrize(
    "before",
    [
        [],
        [b""],
        [exif_of(turning())],
        [exif_of(turning(), order="<")],
        [b"Exif\0\0" + exif_of(turning())],
        [exif_of(turning(1), count=9)],
        [exif_of(), exif_of(turning(1))],
        [exif_of(turning(), (DESCRIPTION, 4, 2**30), (0x8769, 1, 2**30))],
    ],
)
def test_png_that_they_turn_alike_passes(before: list[bytes]) -> None:
    check_image(png(before))
    assert decoder_turns(png(before)) == parser_turns(png(before, height=SIDE // 2))


EXIF = (b"EXIF", exif_of(turning()))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (webp(), "that is not there"),
        (webp((b"XMP ", b"abcd")), "that is not there"),
        (webp((b"XMP ", b"abc"), EXIF), "behind a chunk of odd length"),
        (webp(EXIF, odd=True), "behind a chunk of odd length"),
    ],
    ids=["none", "XMP", "XMP of 3 bytes", "image of odd length"],
)
def test_webp_whose_exif_data_are_not_found_is_stopped(file: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        check_image(file)
    with pytest.raises(RuntimeError, match="nvImageCodec failure"):
        run_dali(file, peek=False)


@pytest.mark.parametrize(
    "behind",
    [[EXIF], [(b"XMP ", b"abcd"), EXIF], [EXIF, (b"XMP ", b"abc")], [(b"EXIF", exif_of(turning(), count=9))]],
)
@pytest.mark.parametrize("announced", [True, False])
def test_webp_that_they_turn_alike_passes(behind: list[WebpChunk], announced: bool) -> None:
    check_image(webp(*behind, announced=announced))
    turns = decoder_turns(webp(*behind, announced=announced))
    assert turns == parser_turns(webp(*behind, announced=announced, height=SIDE // 2)) == announced


def test_block_of_every_length_is_read() -> None:
    block = exif_of(turning(), (DESCRIPTION, 16, 46), (X_RESOLUTION, 1, 54))
    assert read_exif(block) == (True, True)
    assert [read_exif(block[:size]).whole for size in range(4, len(block))] == [False] * (len(block) - 4)

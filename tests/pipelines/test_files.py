import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peclr_dali.pipelines.files.check import check_image, image_headers, image_sizes_px, read_sound_jpegs, spread
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES, MAX_PIXELS, BadImage
from peclr_dali.pipelines.samples.index import Index, read_file
from tests.pipelines.image_files import Part, encoded, good_files, put_together

GOOD = good_files()
JPEG = GOOD["jpeg"]
PNG = GOOD["png"]
WEBP, CANVAS = GOOD["webp"], GOOD["webp exif"]
ANIMATED = encoded(Image.new("RGB", (8, 8)), "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
SOF = JPEG.index(b"\xff\xc0")
SOS = JPEG.index(b"\xff\xda")


def edited(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def header(width: int = 2, height: int = 2, depth: int = 8, colour: int = 2, interlace: int = 0) -> Part:
    return Part(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


DATA, END = Part(b"IDAT", zlib.compress(bytes(14))), Part(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (bytes(900), "zero bytes"),
        (b"<!DOCTYPE html><html>404</html>", "HTML or XML, not an image"),
        (encoded(Image.new("P", (8, 8)), "GIF"), "GIF is not read"),
        (b"\0\0\0\x20ftypavif", "AVIF is not read"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"%PDF-1.4", "unknown kind, which begin with b'%PDF-1.4'"),
        (b"\xff\xd8", "a JPEG that is damaged after its first bytes"),
        (JPEG[:15], "length 16 in a file of 15"),
        (JPEG[:SOF], "cut in its header"),
        (JPEG[: SOS + 30], "no end marker"),
        (edited(JPEG, SOF + 2, b"\0\x01"), "of length 1 "),
        (edited(JPEG, SOF + 1, b"\xc4"), "without a frame header"),
        (JPEG[:SOF] + JPEG[SOF : SOF + 19] + JPEG[SOF:], "two frame headers"),
        (edited(JPEG, SOF + 1, b"\xc3"), "lossless"),
        (edited(JPEG, SOF + 4, b"\x0c"), "12 bits"),
        (edited(JPEG, SOF + 5, struct.pack(">HH", 0, 64)), "64 x 0"),
        (edited(JPEG, SOF + 5, struct.pack(">HH", 9000, 9000)), "81000000 pixels in a file of only"),
        (edited(JPEG, SOF + 9, b"\x04"), "4 components in 17 bytes"),
        (edited(JPEG, 20, b"\0"), "without a marker at byte 20"),
        (edited(JPEG, 21, b"\xd9"), "marker D9 in the header, at byte 20"),
        (PNG[:20], "has 13 bytes, more than the rest"),
        (PNG[:-12], "PNG cut"),
        (edited(PNG, 60, bytes([PNG[60] ^ 1])), "wrong checksum"),
        (put_together([DATA, END]), "begin with its header"),
        (put_together([header(), END]), "without image data"),
        (put_together([header(), header(), DATA, END]), "PNG header at byte 33 has 13 bytes, or is the second"),
        (put_together([Part(b"IHDR", bytes(12)), DATA, END]), "PNG header at byte 8 has 12 bytes"),
        (put_together([header(depth=16, colour=3), DATA, END]), "depth 16, colour type 3"),
        (put_together([header(interlace=2), DATA, END]), "interlace 2"),
        (put_together([header(width=65000, height=65000), DATA, END]), "65000 x 65000"),
        (put_together([header(width=9000, height=9000), DATA, END]), "243000000 bytes of pixels, but the image data"),
        (WEBP[:-2], "WebP header says 942 bytes, but the file has 940"),
        (edited(WEBP, 4, b"\xa5") + b"\0", "WebP header says 941 bytes; expected an even number"),
        (edited(WEBP, 16, b"\xff"), "chunk at byte 12 has"),
        (edited(WEBP, 23, b"\0"), "without the header of a key frame"),
        (edited(WEBP, 26, b"\1\0\1\0"), "WebP header says 1 x 1"),
        (edited(WEBP, 12, b"ICCP"), "without an image"),
        (edited(GOOD["webp lossless"], 20, b"\0"), "without the header of a lossless image"),
        (edited(CANVAS, 24, b"\x48"), "72 x 56 on a canvas of 73 x 56"),
        (edited(CANVAS, 12, b"ICCP"), "misplaced image at byte 626"),
        (edited(CANVAS, 16, b"\x08"), "canvas at byte 12 has 8 bytes"),
        (ANIMATED, "animated WebP"),
    ],
)
def test_what_is_no_sound_image_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        check_image(data)


def test_an_image_at_the_limit_and_an_array_with_gaps_are_read() -> None:
    check_image(encoded(Image.new("1", (10_000, MAX_PIXELS // 10_000)), "PNG"))
    assert check_image(np.repeat(np.frombuffer(JPEG, np.uint8), 2)[::2]).encoded.tobytes() == JPEG


def test_sound_jpegs_of_any_size_are_read_whole_and_nothing_else(tmp_path: Path) -> None:
    """Also files that need more room than was set aside, among small ones; bytes after the end are tolerated."""
    contents = {**good_files(), "cut": JPEG[: len(JPEG) // 2], "empty": b"", "text": b"no image", "höhe ж": JPEG}
    contents |= {f"large {size}": JPEG + bytes([7]) * size for size in (1, 100_000, 5_000_000, 0)}
    for number, data in enumerate(contents.values()):
        (tmp_path / f"ж{number}").write_bytes(data)
    paths = [str(tmp_path / f"ж{number}") for number in range(len(contents))] * 2
    read = read_sound_jpegs([*paths, str(tmp_path / "missing"), str(tmp_path)])
    assert read[-2:] == [None, None]
    for (name, data), ours in zip([*contents.items()] * 2, read[:-2], strict=True):
        assert (ours is not None) == (data.startswith(b"\xff\xd8") and name != "cut"), name
        if ours is not None:
            assert ours.encoded.tobytes() == data
            assert ours[1:] == check_image(data)[1:]
    sound = [file.encoded for file in read if file is not None]
    assert not np.shares_memory(sound[0], sound[len(sound) // 2])  # of the same file, read twice
    assert read_sound_jpegs([]) == []
    with pytest.raises(ValueError, match="zero byte"):
        read_sound_jpegs(["a\0b"])


def open_files(folder: Path) -> list[str]:
    """The files of a folder, and itself, that this process holds open; those of earlier tests do not count."""
    paths = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    return [path for path in paths if path.startswith(str(folder))]


def test_pipes_devices_and_huge_files_are_refused_at_once(tmp_path: Path) -> None:
    """Above all a pipe, which would never open, and what would not fit into memory. No file stays open."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    (tmp_path / "good").write_bytes(JPEG + bytes(200_000))
    with (tmp_path / "good").open("rb"):
        assert open_files(tmp_path) == [str(tmp_path / "good")]
    paths = [str(tmp_path / name) for name in ("pipe", "large", "good", "missing", "")]
    for _ in range(3):
        assert [file is not None for file in read_sound_jpegs(paths)] == [False, False, True, False, False]
    for path in (paths[0], str(tmp_path), "/proc/self/mem", "/proc/self/maps"):
        with pytest.raises(OSError, match=r"not a regular file|empty file"):
            read_file(path)
    with pytest.raises(OSError, match="256 MiB; only files of up to 256 MiB are read"):
        read_file(paths[1])
    assert read_file(paths[2]) == JPEG + bytes(200_000)
    assert open_files(tmp_path) == []


def test_sizes_are_those_of_the_headers(tmp_path: Path) -> None:
    """Whatever the name says; 0 without an image; turned as displayed, or as stored."""
    Image.new("RGB", (513, 512)).save(tmp_path / "a.jpg", "PNG")
    (tmp_path / "b.jpg").write_bytes(b"not an image")
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (64, 48)).save(tmp_path / "c.jpg", exif=exif)
    index = Index("images", tmp_path, ["a.jpg", "b.jpg", "c.jpg", "missing.jpg"], np.zeros((4, 3), np.float32))
    assert image_sizes_px(index.read_many(range(4))).tolist() == [[512, 513], [0, 0], [64, 48], [0, 0]]
    assert image_headers(index.read_many(range(4))).tolist() == [[512, 513, 1], [0, 0, 1], [48, 64, 6], [0, 0, 1]]
    assert [spread(0, 3), spread(2, 3), spread(9, 3)] == [[], [0, 1], [0, 4, 8]]

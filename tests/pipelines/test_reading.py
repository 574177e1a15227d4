import os
from pathlib import Path

import numpy as np
import pytest

from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES, BadImage
from peclr_dali.pipelines.files.reading import read_sound_jpegs
from peclr_dali.pipelines.samples.index import read_file
from tests.pipelines.decoder_fuzz import good_files


def test_sound_jpegs_are_read_and_nothing_else(tmp_path: Path) -> None:
    jpeg = good_files()["jpeg"]
    contents = {**good_files(), "cut": jpeg[: len(jpeg) // 2], "empty": b"", "text": b"no image", "höhe ж": jpeg}
    paths = []
    for name, data in contents.items():
        (tmp_path / name.replace(":", "_")).write_bytes(data)
        paths.append(str(tmp_path / name.replace(":", "_")))
    paths += [str(tmp_path / "missing"), str(tmp_path)]
    read = read_sound_jpegs(paths)
    assert len(read) == len(paths)
    for (name, data), ours in zip(contents.items(), read, strict=False):
        try:
            check_image(data)
            sound = data.startswith(b"\xff\xd8")
        except BadImage:
            sound = False
        assert (ours is not None) == sound, name
        if ours is not None:
            assert ours.encoded.tobytes() == data
            assert ours[1:] == check_image(data)[1:]
    assert read[-2:] == [None, None]
    assert sum(data is not None for data in read) > 8


@pytest.mark.parametrize("extra", [0, 1, 100_000, 5_000_000])
def test_files_of_any_size_are_read_whole(extra: int, tmp_path: Path) -> None:
    """Also such as need more room than was set aside, among small ones; bytes after the end are tolerated."""
    jpeg = good_files()["jpeg"]
    sizes = [0, extra, 0, extra, extra, 0]
    paths = []
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}").write_bytes(jpeg + bytes([number]) * size)
        paths.append(str(tmp_path / f"{number}"))
    for number, (size, data) in enumerate(zip(sizes, read_sound_jpegs(paths), strict=True)):
        assert data is not None
        assert data.encoded.tobytes() == jpeg + bytes([number]) * size


def open_files(folder: Path) -> list[str]:
    """The files of a folder, and itself, that this process holds open; those of earlier tests do not count."""
    paths = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    return [path for path in paths if path.startswith(str(folder))]


def test_pipes_devices_and_huge_files_are_refused_at_once(tmp_path: Path) -> None:
    """Above all a pipe, which would never open, and what would not fit into memory. No file stays open."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    good = good_files()["jpeg"] + bytes(200_000)
    (tmp_path / "good").write_bytes(good)
    with (tmp_path / "good").open("rb"):
        assert open_files(tmp_path) == [str(tmp_path / "good")]
    paths = [str(tmp_path / name) for name in ("pipe", "large", "good", "missing", "")]
    for _ in range(20):
        pipe, large, last, *_ = read_sound_jpegs(paths)
        assert pipe is large is None
        assert last is not None
        assert last.encoded.tobytes() == good
    for path in (paths[0], str(tmp_path)):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    with pytest.raises(OSError, match="256 MiB; only files of up to 256 MiB are read"):
        read_file(paths[1])
    assert read_file(paths[2]) == good
    assert open_files(tmp_path) == []


def test_no_files_and_files_that_are_read_twice(tmp_path: Path) -> None:
    assert read_sound_jpegs([]) == []
    (tmp_path / "image").write_bytes(good_files()["jpeg"])
    one, two = read_sound_jpegs([str(tmp_path / "image")] * 2)
    assert one is not None
    assert two is not None
    assert not np.shares_memory(one.encoded, two.encoded)
    with pytest.raises(ValueError, match="zero byte"):
        read_sound_jpegs(["a\0b"])

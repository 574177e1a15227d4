import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from peclr_dali.pipelines.files.check import check_image, read_sound_jpegs
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.samples import index
from peclr_dali.pipelines.samples.index import read_file
from tests.pipelines.image_files import good_files

JPEG = good_files()["jpeg"]


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


def test_a_special_file_that_gives_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/kmsg, which is a regular file by its mode: its `read` gives None."""
    waiting = nullcontext(SimpleNamespace(read=lambda: None))
    monkeypatch.setattr(index, "open", lambda *arguments, **options: waiting, raising=False)
    with pytest.raises(OSError, match="not readable now"):
        read_file(__file__)


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
    for path in (paths[0], str(tmp_path)):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    with pytest.raises(OSError, match="256 MiB; only files of up to 256 MiB are read"):
        read_file(paths[1])
    assert read_file(paths[2]) == JPEG + bytes(200_000)
    assert open_files(tmp_path) == []

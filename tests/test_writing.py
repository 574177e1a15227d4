"""What a command writes is whole or absent, whatever the disk does."""

import contextlib
import os
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from peclr_dali.train.runs.pictures import save_figure, save_sheet
from peclr_dali.writing import whole_file, write_text


def save_by_torch(path: Path) -> None:
    with whole_file(path) as file:
        torch.save({"weight": torch.zeros(5000)}, file)


def save_by_matplotlib(path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    save_figure(path, figure, dpi=100)


def save_by_zipfile(path: Path) -> None:
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", os.urandom(5000))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more than `size` bytes into a file.

    Python must not write bytecode meanwhile: it does not notice that the file ends early, and no later process could
    import the module.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with patch.object(sys, "dont_write_bytecode", True), patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
WRITERS: dict[str, Callable[[Path], None]] = {
    "text.toml": lambda path: write_text(path, "x" * 5000),
    "torch.pth": save_by_torch,
    "matplotlib.png": save_by_matplotlib,
    "opencv.png": lambda path: save_sheet(path, [NOISE], columns=1),
    "zipfile.zip": save_by_zipfile,
}


@pytest.mark.parametrize("before", [None, b"what was there"])
@pytest.mark.parametrize("name", WRITERS)
def test_on_a_full_disk_only_the_old_file_stays(name: str, before: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / name
    if before is not None:
        file.write_bytes(before)
    with files_of_at_most(2000), pytest.raises(OSError, match=name) as refused:
        WRITERS[name](file)
    assert refused.value.__notes__ == [f"{file} was not written"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({} if before is None else {name: before})
    WRITERS[name](file)
    assert file.stat().st_size > 2000
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_error_of_the_block_is_not_reported_as_the_disks(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(FileNotFoundError, match="elsewhere"):  # noqa: PT012, SIM117
        with whole_file(tmp_path / "a") as file:
            file.write(b"half")
            (tmp_path / "elsewhere").read_bytes()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """By the name of a link, so that a mistake costs the link alone."""
    (tmp_path / "device").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "pipe"):
        with pytest.raises(OSError, match=f"not a regular file: .*{name}"):
            write_text(tmp_path / name, "lost")
    assert Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "pipe"]

"""What a command writes is whole or absent, whatever the disk does, and never over what it reads."""

from __future__ import annotations

import ast
import errno
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from peclr_dali.errors import UserError
from peclr_dali.train.runs.pictures import save_figure, save_sheet
from peclr_dali.writing import NotWritten, refuse_inputs, remove_leftovers, whole_file, write_bytes, write_text
from tests.full_disk import files_of_at_most
from tests.test_structure import MODULES, PACKAGE


def save_by_torch(path: Path) -> None:
    with whole_file(path) as file:
        torch.save({"weight": torch.zeros(5000)}, file)


def save_by_matplotlib(path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    save_figure(path, figure, dpi=100)


def save_by_opencv(path: Path) -> None:
    save_sheet(path, [np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)], columns=1)


def save_by_zipfile(path: Path) -> None:
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", os.urandom(5000))


WRITERS: dict[str, Callable[[Path], None]] = {
    "text.toml": lambda path: write_text(path, "x" * 5000),
    "torch.pth": save_by_torch,
    "matplotlib.png": save_by_matplotlib,
    "opencv.png": save_by_opencv,
    "opencv.jpg": save_by_opencv,
    "zipfile.zip": save_by_zipfile,
}


@pytest.mark.parametrize("before", [None, b"what was there"])
@pytest.mark.parametrize("name", WRITERS)
def test_on_a_full_disk_only_the_old_file_stays(name: str, before: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / name
    if before is not None:
        file.write_bytes(before)
    with files_of_at_most(2000), pytest.raises(NotWritten, match=f"{name} cannot be written: File too large. Name ano"):
        WRITERS[name](file)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({} if before is None else {name: before})
    WRITERS[name](file)
    assert file.stat().st_size > 2000
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_error_of_the_last_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten) as caught:
        write_text(tmp_path / "config.toml", "new")
    message = f"{tmp_path / 'config.toml'} cannot be written: No space left on device. Make room, or name another place"
    assert str(caught.value) == message
    assert isinstance(caught.value, UserError)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_block_is_not_reported_as_the_disks(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(FileNotFoundError, match="elsewhere"):  # noqa: PT012, SIM117
        with whole_file(tmp_path / "a") as file:
            file.write(b"half")
            (tmp_path / "elsewhere").read_bytes()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=r"no/a cannot be written: No such file or directory. Make the folder first"):
        write_bytes(tmp_path / "no" / "a", b"")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o640)
    write_text(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)


def test_another_file_that_ends_in_part_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_text("the user's")
    write_text(tmp_path / "file", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.part"]
    assert (tmp_path / "file.part").read_text() == "the user's"


def test_the_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in ("loss.png.4242-1f.part", "loss.png.part", "mine.png.4242-1f.part", "loss.png"):
        (tmp_path / name).write_text("x")
    remove_leftovers([tmp_path / "loss.png", tmp_path / "absent"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "loss.png.part", "mine.png.4242-1f.part"]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """By the name of a link, so that a mistake costs the link alone."""
    (tmp_path / "out").symlink_to("/dev/null")
    write_text(tmp_path / "out", "lost")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "told")
    assert os.read(reader, 100) == b"told"
    os.close(reader)
    with pytest.raises(NotWritten, match=r"pipe cannot be written: .*\. It is a pipe that nobody reads"):
        write_text(tmp_path / "pipe", "waits for ever")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_inputs_are_known_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("")
    (tmp_path / "link").symlink_to("input")
    os.link(tmp_path / "input", tmp_path / "other name")
    for name in ("input", "link", "other name", "../" + tmp_path.name + "/input"):
        with pytest.raises(UserError, match="is an input of this command and is not overwritten: name another file"):
            refuse_inputs(tmp_path / name, [tmp_path / "missing", tmp_path / "input"])
    refuse_inputs(tmp_path / "new", [tmp_path / "missing", tmp_path / "input"])


WRITE_THEMSELVES = {
    "writing.py",
    "pipelines/sources/shards/pack.py",  # a shard is read back before it is renamed
    "pipelines/sources/remote/cache.py",  # a download is checked before it is renamed
    "bench/loaders/frames.py",  # into a folder that is renamed when it is whole
}


def test_all_files_are_written_through_this_module() -> None:
    product = {file.relative_to(PACKAGE).as_posix(): file for file in MODULES}
    found = {path: calls for path, file in product.items() if (calls := writes(file.read_text(encoding="utf-8")))}
    assert {path: calls for path, calls in found.items() if path not in WRITE_THEMSELVES} == {}
    assert WRITE_THEMSELVES - {"writing.py"} <= found.keys()


@pytest.mark.parametrize(
    "source",
    ["path.write_text('')", "path.write_bytes(b'')", "cv2.imwrite('a.png', x)", "path.open('w')", "open(path, 'wb')",
     "save_file(tensors, out)", "figure.savefig(out, dpi=120)", "torch.save(x, out)", "os.fdopen(d, mode='x')"],
)  # fmt: skip
def test_a_file_written_in_another_way_is_found(source: str) -> None:
    assert len(writes(source)) == 1


def writes(source: str) -> list[str]:
    """Calls that write a whole file by themselves. What is given a stream, called `file` or `buffer`, is none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        arguments = [ast.unparse(value) for value in [*node.args, *(keyword.value for keyword in node.keywords)]]
        streams = any(word in ("file", "buffer") for word in arguments)
        if (
            (method and name in ("write_text", "write_bytes", "imwrite"))
            or name == "save_file"
            or (name in ("open", "fdopen") and any(word[1:2] in ("w", "x") and word[0] == "'" for word in arguments))
            or (name == "savefig" and not streams)
            or (name == "save" and ast.unparse(node.func).startswith(("torch.", "np.")) and not streams)
        ):
            found.append(ast.unparse(node))
    return found

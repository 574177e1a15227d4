"""Paths that may not be searched, and odd content that several sources could meet: one line each, of one kind."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.shards.pack import pack
from tests.pipelines.sources import layouts
from tests.pipelines.sources.test_freihand import write_part


@contextmanager
def may_not_be_searched(folder: Path) -> Iterator[None]:
    """A folder as it is for somebody who may not look behind it; root may always, so it is somebody else then."""
    folder.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with every kind of data in it, where everybody may look: pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield write_data(Path(name))


def write_data(home: Path) -> Path:
    for name in ("a.jpg", "b.jpg"):
        layouts.write_image(home / "folder" / name, 60, 40)
    write_bad_list(home / "bad.jsonl", {"a.jpg": "for a test"})
    (home / "boxes.csv").write_text("file,x0,y0,x1,y1\na.jpg,5,5,35,35\nb.jpg,5,5,35,35\n")
    np.save(home / "regressor.npy", np.ones((16, 778)) / 778)
    write_part(home / "freihand", "training", 2, 8)
    layouts.write_youtube3d(home / "youtube3d", "train")
    layouts.write_ho3d(home / "ho3d", "train", {"ABF10": 2})
    layouts.write_dexter_object(home / "dexter_object", {"Grasp1": 2}, hidden={})
    pack(load_folder(DataConfig("folder", str(home / "folder"))), home / "shards", per_tar=2, workers=1)
    return home


@pytest.mark.parametrize("source", ["folder", "freihand", "youtube3d", "ho3d", "dexter_object", "shards"])
def test_a_root_without_permission_is_one_line(home: Path, source: Any) -> None:
    config = DataConfig(source=source, root=str(home / source))
    load_index(config)
    for folder in (home, home / source):
        with may_not_be_searched(folder), pytest.raises(UserError, match=f"{home / source}.*ermission denied"):
            load_index(config)


@pytest.mark.parametrize(
    ("key", "file", "source"),
    [("bad_list", "bad.jsonl", "folder"), ("box", "boxes.csv", "folder"), ("regressor", "regressor.npy", "youtube3d")],
)
def test_a_file_without_permission_is_one_line(home: Path, key: str, file: str, source: Any) -> None:
    hidden = home / "hidden"
    hidden.mkdir()
    (home / file).rename(hidden / file)
    keys: dict[str, Any] = {"source": source, "root": str(home / source), key: str(hidden / file)}
    config = DataConfig(**keys)
    load_index(config)
    with may_not_be_searched(hidden), pytest.raises(UserError, match=f"{hidden / file}.*ermission denied"):
        load_index(config)


def test_names_that_are_not_utf8_are_names_like_others(tmp_path: Path) -> None:
    name = b"h\xe4nde".decode(errors="surrogateescape")
    root = tmp_path / name
    for image in (f"{name}.jpg", "b.jpg"):
        layouts.write_image(tmp_path / "plain.jpg", 60, 40)
        root.mkdir(exist_ok=True)
        (tmp_path / "plain.jpg").rename(root / image)
    index = load_index(DataConfig(source="folder", root=str(root)))
    assert index.paths == ["b.jpg", f"{name}.jpg"]
    write_bad_list(tmp_path / "bad.jsonl", {f"{name}.jpg": "for a test"})
    left = load_index(DataConfig(source="folder", root=str(root), bad_list=str(tmp_path / "bad.jsonl")))
    assert left.paths == ["b.jpg"]
    assert pack(index, tmp_path / f"out_{name}", per_tar=1, workers=1).samples == 2
    shards = load_index(DataConfig(source="shards", root=str(tmp_path / f"out_{name}")))
    assert shards.read(1) == index.read(1)
    write_part(tmp_path / "hands", "training", 1, 4)
    (tmp_path / "hands").rename(root / "hands")
    assert len(load_index(DataConfig(source="freihand", root=str(root / "hands")))) == 4


@contextmanager
def as_a_pipe(file: Path) -> Iterator[None]:
    """A pipe at the place of a file, which ends without a byte for whoever reads it: nothing hangs."""
    os.rename(file, f"{file}.away")  # noqa: PTH104
    os.mkfifo(file)
    thread = threading.Thread(target=lambda: file.open("wb").close(), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))  # the thread waits for a reader
        os.replace(f"{file}.away", file)  # noqa: PTH105


@pytest.mark.parametrize(
    ("source", "file", "key"),
    [
        ("folder", "boxes.csv", "box"),
        ("folder", "bad.jsonl", "bad_list"),
        ("youtube3d", "regressor.npy", "regressor"),
        ("freihand", "freihand/training_xyz.json", ""),
        ("ho3d", "ho3d/train.txt", ""),
        ("ho3d", "ho3d/train/ABF10/meta/0000.pkl", ""),
        ("dexter_object", "dexter_object/data/Grasp1/annotations/Grasp13D.txt", ""),
    ],
)
def test_a_pipe_instead_of_a_file_is_one_line(home: Path, source: Any, file: str, key: str) -> None:
    keys: dict[str, Any] = {key: str(home / file)} if key else {}
    config = DataConfig(source=source, root=str(home / source), **keys)
    with as_a_pipe(home / file), pytest.raises(UserError, match=f"{Path(file).name}.*is a pipe or a device"):
        load_index(config)


def test_pipes_and_devices_are_not_images(home: Path) -> None:
    os.mkfifo(home / "folder" / "pipe.jpg")
    config = DataConfig(source="folder", root=str(home / "folder"))
    assert load_index(config).paths == ["a.jpg", "b.jpg"]
    for name in ("a.jpg", "b.jpg"):
        (home / "folder" / name).rename(home / "folder" / f".{name}")
    with pytest.raises(UserError, match=r"found 2 hidden, 1 no regular file, such as a pipe\. Check"):
        load_index(config)

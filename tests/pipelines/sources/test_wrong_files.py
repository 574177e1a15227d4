"""Paths that may not be searched, pipes and odd names, which several sources could meet: one line each, of one kind."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index, write_bad_list
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
        home = Path(name)
        home.chmod(0o755)
        for image in ("a.jpg", "b.jpg"):
            layouts.write_image(home / "folder" / image, 60, 40)
        np.save(home / "regressor.npy", np.ones((16, 778)) / 778)
        write_part(home / "freihand", "training", 2, 8)
        layouts.write_youtube3d(home / "youtube3d", "train")
        layouts.write_ho3d(home / "ho3d", "train", {"ABF10": 2})
        layouts.write_dexter_object(home / "dexter_object", {"Grasp1": 2}, hidden={})
        pack(load_folder(DataConfig("folder", str(home / "folder"))), home / "shards", per_tar=2, workers=1)
        yield home


@pytest.mark.parametrize("source", ["folder", "freihand", "youtube3d", "ho3d", "dexter_object", "shards"])
def test_a_root_without_permission_is_one_line(home: Path, source: Any) -> None:
    config = DataConfig(source=source, root=str(home / source))
    load_index(config)
    with may_not_be_searched(home / source), layouts.one_line(f"{home / source}.*ermission denied"):
        load_index(config)


@pytest.mark.parametrize("source", ["ho3d", "dexter_object"])
def test_images_of_another_size_than_their_labels_are_one_line(home: Path, source: Any) -> None:
    for image in (home / source).rglob("*.png"):
        layouts.write_image(image, 1600, 1200)
    layouts.assert_refused(
        DataConfig(source=source, root=str(home / source)),
        "2 of 2 images have another size than their labels, .* 1600, 1200; K",
    )


def test_names_that_are_not_utf8_are_names_like_others(tmp_path: Path) -> None:
    name = b"h\xe4nde".decode(errors="surrogateescape")
    root = tmp_path / "images"
    root.mkdir()
    for image in (f"{name}.jpg", "b.jpg"):
        layouts.write_image(tmp_path / "plain.jpg", 60, 40)
        (tmp_path / "plain.jpg").rename(root / image)
    write_bad_list(tmp_path / "bad.jsonl", {"b.jpg": "for a test"})
    index = load_index(DataConfig("folder", str(root), bad_list=str(tmp_path / "bad.jsonl")))
    assert index.paths == [f"{name}.jpg"]
    assert pack(index, tmp_path / "out", per_tar=1, workers=1).samples == 1
    assert load_index(DataConfig("shards", str(tmp_path / "out"))).read(0) == index.read(0)


@pytest.mark.parametrize(
    ("source", "file", "keys"),
    [
        ("youtube3d", "regressor.npy", {"regressor": "regressor.npy"}),
        ("freihand", "freihand/training_xyz.json", {}),
        ("ho3d", "ho3d/train/ABF10/meta/0000.pkl", {}),
    ],
)
def test_a_pipe_instead_of_a_file_is_one_line(
    home: Path, source: Any, file: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for who would write into it."""
    monkeypatch.chdir(home)
    (home / file).unlink()
    os.mkfifo(home / file)
    layouts.assert_refused(
        DataConfig(source=source, root=str(home / source), **keys), f"{Path(file).name}.*is a pipe or a device"
    )


def test_a_pipe_among_images_is_no_image(home: Path) -> None:
    os.mkfifo(home / "folder" / "pipe.jpg")
    assert load_index(DataConfig("folder", str(home / "folder"))).paths == ["a.jpg", "b.jpg"]

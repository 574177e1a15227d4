"""The benchmark as a whole, in little: everything is measured, and the row says on what."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import mmap
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from rich.console import Console

from bench.loaders import tune
from bench.loaders.compare import compare_loaders
from bench.loaders.frames import make_frames
from bench.loaders.ours import CPU, LoaderSettings, drop_from_page_cache, make_endless_loader, thread_counts
from bench.loaders.parts import encoded_chunks, parts_of_loader
from bench.loaders.peers import PEERS, installed_peers
from bench.loaders.report import as_tables, find_row, regression, require_comparable, save_plot
from bench.measure import Rate
from errors import UserError
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.sources import load_index
from tests.pipelines.test_kept_pixels import packed_by
from tests.train.tiny_run import write_images
from train.config.pretraining import Config


@pytest.mark.slow  # measures every installed peer
def test_everything_is_measured(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=48)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    packed_by(
        load_index(DataConfig("folder", str(tmp_path / "images"), box_margin=1)), tmp_path / "pixels", config.geometry
    )
    pixels = str(tmp_path / "pixels")
    settings = LoaderSettings(cores=1, batch=16, repeats=2, repeat_s=0.1, warmup_s=0.1, passes=2, pixels=pixels)
    row = json.loads(json.dumps(compare_loaders(config, settings, device=CPU)))
    names = [entry["name"] for entry in row["loaders"]]
    assert names == ["this loader", "this loader, pixels kept", *installed_peers()]
    assert list(row["threads"]) == ["1"]
    assert all(entry["images_per_s"] > 0 for entry in [*row["loaders"], *row["stages"], *row["threads"].values()])
    assert row["loaders"][0]["images_per_s"] < 2 * min(entry["images_per_s"] for entry in row["stages"])

    assert {"date", "cpu", "cores", "torch", "nvidia-dali-cuda120", "commit"} <= row["machine"].keys()
    ours = row["loaders"][0]
    assert ours["views_per_s"] == pytest.approx(2 * ours["images_per_s"], rel=1e-3)
    low, high = ours["interval"]
    assert low <= ours["images_per_s"] <= high
    assert ours["ours_is"] == [1, 1, 1]
    assert all(loader["memory_mib"] > 50 and 0 < loader["cores_busy"] < 1.5 for loader in row["loaders"])
    assert row["page_cache"]["bytes_per_image"] > 0
    assert regression(row, row) is None

    assert "OpenCV + DataLoader, tuned" in text_of(row)
    save_plot(row, tmp_path / "loader.png")
    assert cv2.imread(str(tmp_path / "loader.png")) is not None


@pytest.mark.parametrize("backend", ["opencv", "dali"])
def test_kept_pixels_have_no_decoder_to_measure(tmp_path: Path, backend: Any) -> None:
    write_images(tmp_path / "images", count=32)
    config = Config(pipelines=PipelinesConfig(backend=backend, threads=1))
    packed_by(load_index(DataConfig("folder", str(tmp_path / "images"))), tmp_path / "pixels", config.geometry)
    parts = parts_of_loader(load_index(DataConfig("shards", str(tmp_path / "pixels"))), config, 16, CPU)
    assert not any(part.name.startswith("decode only") for part in parts)
    for part in parts:
        making = part.start()
        assert next(making) == 16
        assert isinstance(making, Generator)
        making.close()


def text_of(row: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in as_tables(row):
        console.print(table)
    return " ".join(console.export_text().split())


@pytest.mark.parametrize("decode", ["region", "whole"])
def test_a_table_says_what_decode_only_decodes(tmp_path: Path, decode: Any) -> None:
    """Regions of large images against whole ones: rates that differ by a factor, of different work."""
    write_images(tmp_path / "images", count=48)
    data = DataConfig(source="folder", root=str(tmp_path / "images"))
    config = Config(data=data, pipelines=PipelinesConfig(decode=decode))
    figures = {
        "images_per_s": 9, "interval": [8, 10], "cpu_ms_per_image": 1, "cores_busy": 1, "memory_mib": 1,
        "ours_is": [1, 1, 1],
    }  # fmt: skip
    parts = parts_of_loader(load_index(data), config, 16, CPU)
    row = {
        "settings": {"cores": 1, "batch": 16, "repeats": 2},
        "device": "cpu",
        "loaders": [
            {"name": "this loader", "description": "", **figures},
            {"name": "decode only (DALI)", "description": PEERS["decode only (DALI)"].description, **figures},
        ],
        "stages": [{"name": part.name, "description": part.description, **figures} for part in parts],
        "threads": {},
    }
    text = text_of(row)
    what = "whole" if decode == "whole" else "of large ones only the regions that the views reach"
    assert f"decode only: bytes in memory to decoded images, {what}, as the loader does here" in text
    assert "an upper limit for loaders that decode whole images" in text


def test_the_decoder_alone_sees_images_of_all_sizes(tmp_path: Path) -> None:
    """One large image makes small chunks; eight of them would be a few images, met again and again."""
    write_images(tmp_path / "images", count=48)
    data = DataConfig(source="folder", root=str(tmp_path / "images"))
    config = Config(data=data, pipelines=PipelinesConfig(batch=2))
    with make_endless_loader(load_index(data), config, 16, CPU) as loader:
        seen = np.concatenate([chunk.samples for chunk in encoded_chunks(loader)])
    assert len(np.unique(seen)) == 48


def test_too_few_images_or_cores_are_reported(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=4)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    with pytest.raises(UserError, match="4 images, fewer than --batch = 16: use more images or a smaller batch"):
        compare_loaders(config, LoaderSettings(cores=1, batch=16), device=CPU)
    with pytest.raises(UserError, match="--cores 4096"):
        compare_loaders(config, LoaderSettings(cores=4096, batch=2), device=CPU)


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_thread_counts(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_dropped_files_are_no_longer_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (1 << 22))
    drop_from_page_cache([file])
    assert resident_share(file) < 0.1
    file.read_bytes()
    assert resident_share(file) > 0.9


def resident_share(file: Path) -> float:
    """Share of a file's pages that are in the page cache (mincore)."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        whole = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(mapped)), pages)
        del whole
        assert failed == 0
        return sum(page & 1 for page in pages) / len(pages)


def row_of(images_per_s: float, half: float, **machine: str) -> dict[str, Any]:
    return {
        "bench": "loader",
        "machine": {"cpu": "a", "gpu": "none", "date": "2030-01-01", "commit": "abc", **machine},
        "settings": {"cores": 2, "batch": 256},
        "config": {"geometry": {}, "colour": {}},
        "loaders": [{"images_per_s": images_per_s, "interval": [images_per_s - half, images_per_s + half]}],
    }


def test_slower_is_slower_beyond_both_intervals() -> None:
    assert regression(row_of(1000, 50), row_of(910, 50)) is None
    assert regression(row_of(1000, 50), row_of(2000, 50)) is None
    told = regression(row_of(1000, 50), row_of(890, 50))
    assert told is not None
    assert "890 images/s, interval 840 to 940; it was 1000, 950 to 1050" in told


def test_rows_of_other_machines_are_not_compared() -> None:
    with pytest.raises(UserError, match="cpu = 'a', this run with 'b'"):
        require_comparable(row_of(1000, 50), row_of(1000, 50, cpu="b"))


@pytest.mark.parametrize("table", ["geometry", "colour", "appearance"])
def test_rows_of_other_work_are_not_compared(table: str) -> None:
    before, now = row_of(1000, 50), row_of(1000, 50)
    before["config"] = {**before["config"], table: {"key": 1}}
    now["config"] = {**before["config"], table: {"key": 2}}
    with pytest.raises(UserError, match=f"{table} = "):
        require_comparable(before, now)


def test_a_row_is_found_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [row_of(1, 0), {"bench": "soak"}, row_of(2, 0)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_row(str(file)) == rows[2]
    assert find_row(f"{file}:1") == rows[0]
    with pytest.raises(UserError, match="holds 2 rows"):
        find_row(f"{file}:3")
    with pytest.raises(UserError, match="No such file"):
        find_row(str(tmp_path / "none.jsonl"))
    file.write_text("{")
    with pytest.raises(UserError, match="one JSON object a line"):
        find_row(str(file))


def test_large_frames_are_what_the_folder_source_takes(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=4)
    index = load_index(DataConfig(source="folder", root=str(tmp_path / "images")))
    make_frames([index.path(sample) for sample in range(4)], tmp_path / "frames", 3)
    boxes = str(tmp_path / "frames" / "boxes.csv")
    large = load_index(DataConfig(source="folder", root=str(tmp_path / "frames"), box=boxes, box_margin=1.0))
    assert len(large) == 3
    for sample in range(3):
        frame = cv2.imread(str(large.path(sample)))
        assert frame is not None
        assert frame.shape == (720, 1280, 3)
        x, y, side = large.box_px[sample]
        assert side == 250
        assert side / 2 <= x <= 1280 - side / 2
        assert side / 2 <= y <= 720 - side / 2


def test_tuning_gives_toml(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=48)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    settings = LoaderSettings(cores=1, batch=32, repeat_s=0.05, warmup_s=0.05)
    values, rate = tune.tune(config, settings, CPU)
    assert tomllib.loads(tune.as_toml(values, rate)) == {"pipelines": values}
    assert values.keys() == {"threads", "batch", "prefetch"}
    assert values["threads"] == 1
    assert dataclasses.replace(config.pipelines, **values) != config.pipelines


def test_of_equally_fast_values_the_first_is_kept() -> None:
    steady = [Rate(tuple(speed * at for at in (1.0, 1.1, 0.9)), 0.0, 1) for speed in (5, 7, 6)]
    assert tune.fastest(steady) == 1
    noisy = [Rate((5.0, 9.0, 5.0), 0.0, 1), Rate((6.0, 5.0, 9.0), 0.0, 1)]
    assert tune.fastest(noisy) == 0

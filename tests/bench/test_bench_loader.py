"""The benchmark as a whole, at toy size: everything is measured, and the row says on what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from peclr_dali.bench.loaders import parts as bench_parts
from peclr_dali.bench.loaders.compare import checked_files, compare_loaders, verdict
from peclr_dali.bench.loaders.frames import make_frames
from peclr_dali.bench.loaders.parts import parts_of_loader
from peclr_dali.bench.loaders.peers import offered_peers
from peclr_dali.bench.measure import Rounds
from peclr_dali.bench.our_loader import make_endless_loader, our_batches
from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.samples.partners import of_pairs
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from tests.command_line import run_cli
from tests.train.tiny_run import write_images

CPU = World().device


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", count=48)
    return tmp_path / "images"


def of(folder: Path) -> list[str]:
    return ["--batch", "16", "--set", "data.source=folder", "--set", f"data.root={folder}"]


@pytest.mark.slow  # measures every peer
def test_everything_is_measured_and_told(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "rows" / "loader.jsonl"
    command = ["bench-loader", *of(images), "--repeats", "2", "--seconds", "0.1", "--record", str(record)]
    assert run_cli(*command, "--set", "train.device=cpu") == 0
    row = json.loads(record.read_text())
    everything = [*row["loaders"], *row["stages"]]
    assert [entry["name"] for entry in row["loaders"]] == ["this loader", *offered_peers(CPU, only_jpegs=True)]
    assert [entry["name"] for entry in row["stages"]] == ["read only", "decode only"]
    assert all(entry["images_per_s"] > 0 for entry in everything)
    assert all(0 < entry["cores_busy"] < row["machine"]["cores"] + 0.5 for entry in row["loaders"])
    assert (row["card"], row["decoder"], row["views"]) == ("none", "cpu", "cpu")
    assert row["loaders"][0]["ours_is"] == [1, 1, 1]
    assert {"date", "cpu", "cores", "torch", "nvidia-dali-cuda120", "commit"} <= row["machine"].keys()
    told = capsys.readouterr()
    assert "OpenCV + DataLoader, tuned" in told.out
    assert row["verdict"] in told.out
    assert "left out: DALI, plain, on the GPU, which needs a GPU" in told.err


def test_both_images_of_a_pair_are_counted_and_decoded(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partner of image n is image n + 24, modulo 48."""
    data = DataConfig(source="folder", root=str(images))
    index, rows = load_index(data), np.arange(48)
    index = dataclasses.replace(index, partners=of_pairs(np.stack([rows, (rows + 24) % 48], axis=1), 48))
    config, decoded = Config(data=(data,), pipelines=PipelinesConfig(threads=1)), []

    def run_chunks(build: Any, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, None]]:
        for chunk in chunks:
            decoded.append(chunk.samples)
            yield chunk, None

    monkeypatch.setattr(bench_parts, "run_chunks", run_chunks)
    make_loader = partial(make_endless_loader, index, config, 16, CPU)
    parts = parts_of_loader(make_loader, 48)
    assert next(our_batches(index, config, 16, CPU)) == next(iter(parts["read only"][1]())) == 32
    assert next(iter(parts["decode only"][1]())) == 32
    first, second = np.split(decoded[0], 2)
    np.testing.assert_array_equal(second, (first + 24) % 48)


def test_too_few_images_are_reported(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("bench-loader", *of(images), "--batch", "64") == 2
    assert "48 images, fewer than --batch = 64: use more images or a smaller batch" in capsys.readouterr().err


def test_files_are_checked_before_anything_is_measured(images: Path, tmp_path: Path) -> None:
    """Peers get a square for each whole image."""
    cv2.imwrite(str(images / "wide.png"), np.zeros((20, 60, 3), np.uint8))
    index = load_index(DataConfig(source="folder", root=str(images)))
    files, only_jpegs = checked_files(index)
    assert files.boxes_px.tolist() == [[24, 24, 48]] * 48 + [[30, 10, 60]]
    assert not only_jpegs
    (images / "03.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"03\.jpg: cannot be used .*data\.bad_list="):
        checked_files(index)


def test_packed_data_is_measured(images: Path, tmp_path: Path) -> None:
    source = DataConfig(source="folder", root=str(images), box_margin=1.0)
    pack(load_index(source), tmp_path / "shards", per_tar=20, workers=1)
    config = Config(data=(DataConfig(source="shards", root=str(tmp_path / "shards")),))
    rounds = Rounds(repeats=2, repeat_s=0.05, warmup_s=0.05)
    found = compare_loaders(config, rounds, batch=16, peers=True, device=CPU, large=False, progress=print)
    assert [entry["name"] for entry in found["loaders"]] == ["this loader"]
    assert found["verdict"].startswith("The loader makes")


def test_large_frames_are_what_the_folder_source_takes(images: Path, tmp_path: Path) -> None:
    make_frames(sorted(images.iterdir())[:4], tmp_path / "frames", 3)
    boxes = str(tmp_path / "frames" / "boxes.csv")
    large = load_index(DataConfig(source="folder", root=str(tmp_path / "frames"), box=boxes, box_margin=1.0))
    for sample in range(3):
        assert np.asarray(cv2.imread(str(large.path(sample)))).shape == (720, 1280, 3)
        x, y, side = large.box_px[sample]
        assert side == 250
        assert side / 2 <= x <= 1280 - side / 2
        assert side / 2 <= y <= 720 - side / 2


@pytest.mark.parametrize(
    ("ours_ms", "busy", "read", "expected"),
    [
        (0.37, 2.0, (40000.0, 0.03), "The loader makes 5000 images/s; the processor limits it (100% of 2 cores busy)"),
        (0.37, 2.0, (40000.0, 0.03), "decoding takes 54% of its time"),  # 0.20 of 0.03 + 0.20 + 0.14
        (0.92, 2.0, (40000.0, 0.03), "making views takes 75% of its time: change to more cores"),
        (0.75, 2.0, (9000.0, 0.52), "reading takes 69% of its time: change to fewer and larger files"),
        (0.2, 2.0, (40000.0, 0.03), "decoding takes 87% of its time"),  # the parts cost more alone: no time for views
        (0.37, 0.9, (40000.0, 0.03), "no core limits it (45% of 2 busy) but waiting; the part 'decode only' alone"),
    ],
)
def test_the_verdict_names_the_limit(ours_ms: float, busy: float, read: tuple[float, float], expected: str) -> None:
    """A loader on 2 cores; `read`: images/s and CPU ms of an image."""
    parts = {"read": read, "decode": (9000.0, 0.20)}
    row = {
        "machine": {"cores": 2},
        "settings": {},
        "loaders": [{"images_per_s": 5000.0, "cpu_ms_per_image": ours_ms, "cores_busy": busy}],
        "stages": [
            {"name": f"{name} only", "images_per_s": rate, "cpu_ms_per_image": cpu_ms}
            for name, (rate, cpu_ms) in parts.items()
        ],
    }
    assert expected in verdict(row)
    assert "makes 5000 images/s, which is 2500 pairs/s; " in verdict(row | {"images_per_row": 2})

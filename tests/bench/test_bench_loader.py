"""The benchmark as a whole, in little: everything is measured, and the row says on what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from peclr_dali.bench.loaders import parts as bench_parts
from peclr_dali.bench.loaders.compare import compare_loaders, require_sound, verdict
from peclr_dali.bench.loaders.frames import make_frames
from peclr_dali.bench.loaders.parts import first_chunks, parts_of_loader
from peclr_dali.bench.loaders.peers import installed_peers
from peclr_dali.bench.measure import Rounds, measure_in_rounds
from peclr_dali.bench.our_loader import make_endless_loader, our_batches
from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.samples.partners import of_pairs
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from tests.command_line import run_cli
from tests.conftest import Record
from tests.train.tiny_run import write_images

CPU = World().device


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", count=48)
    return tmp_path / "images"


def of(folder: Path, source: str = "folder") -> list[str]:
    return ["--batch", "16", "--set", f"data.source={source}", "--set", f"data.root={folder}"]


def never(*arguments: Any, **options: Any) -> None:
    pytest.fail("begins to measure")


@pytest.mark.slow  # measures every installed peer
@pytest.mark.filterwarnings("ignore:The distutils package:DeprecationWarning")  # FFCV's
def test_everything_is_measured_and_told(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "rows" / "loader.jsonl"
    command = ["bench-loader", *of(images), "--repeats", "2", "--seconds", "0.1", "--record", str(record)]
    assert run_cli(*command, "--set", "train.device=cpu") == 0
    row = json.loads(record.read_text())
    assert [entry["name"] for entry in row["loaders"]] == ["this loader", *installed_peers()]
    assert [entry["name"] for entry in row["stages"]] == ["read only", "decode only"]
    assert all(entry["images_per_s"] > 0 for entry in [*row["loaders"], *row["stages"]])
    assert row["loaders"][0]["images_per_s"] < 2 * min(entry["images_per_s"] for entry in row["stages"])
    assert {"date", "cpu", "cores", "torch", "nvidia-dali-cuda120", "commit"} <= row["machine"].keys()
    ours = row["loaders"][0]
    low, high = ours["interval"]
    assert low <= ours["images_per_s"] <= high
    assert ours["ours_is"] == [1, 1, 1]
    assert all(0 < entry["cores_busy"] < row["machine"]["cores"] + 0.5 for entry in row["loaders"])
    printed = capsys.readouterr().out
    assert "OpenCV + DataLoader, tuned" in printed
    assert "an upper limit for loaders that decode whole images" in printed
    assert row["verdict"] in printed


@pytest.mark.parametrize("decode", ["region", "whole"])
def test_a_part_says_what_it_decodes(images: Path, decode: Any) -> None:
    """Regions of large images against whole ones: rates that differ by a factor, of different work."""
    data = DataConfig(source="folder", root=str(images))
    config = Config(data=data, pipelines=PipelinesConfig(decode=decode, threads=1))
    parts = parts_of_loader(load_index(data), config, 16, CPU)
    what = "whole" if decode == "whole" else "of large ones only the regions that the views reach"
    assert parts["decode only"][0] == f"bytes in memory to decoded images, {what}, as the loader does here"
    for _, start in parts.values():
        making = start()
        assert next(making) == 16
        assert isinstance(making, Generator)
        making.close()


def test_both_images_of_a_pair_are_counted_and_decoded(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partner of image n is image n + 24, modulo 48."""
    data = DataConfig(source="folder", root=str(images))
    index, rows = load_index(data), np.arange(48)
    index = dataclasses.replace(index, partners=of_pairs(np.stack([rows, (rows + 24) % 48], axis=1), 48))
    config, decoded = Config(data=data, pipelines=PipelinesConfig(threads=1)), []

    def run_chunks(build: Any, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, None]]:
        for chunk in chunks:
            decoded.append(chunk.samples)
            yield chunk, None

    monkeypatch.setattr(bench_parts, "run_chunks", run_chunks)
    parts = parts_of_loader(index, config, 16, CPU)
    assert next(our_batches(index, config, 16, CPU)) == next(iter(parts["read only"][1]())) == 32
    assert list(islice(parts["decode only"][1](), 2)) == [16, 16]
    np.testing.assert_array_equal(decoded[1], (decoded[0] + 24) % 48)


@pytest.mark.slow  # measures rates, for a quiet machine
def test_rows_of_two_images_load_at_half_the_rate(tmp_path: Path, record: Record) -> None:
    """Rendered hands, two views of one image against one view of each of two versions."""
    make_dataset(tmp_path / "hands", poses=256, seed=0)
    starts = []
    for positive in ("self", "version"):
        config = Config(data=DataConfig(root=str(tmp_path / "hands"), positive=positive))
        starts.append(partial(our_batches, load_index(config.data), config, 256, CPU))
    rates = measure_in_rounds(starts, Rounds(repeats=7, repeat_s=4.0), lambda done, total: None)
    one, two = rates
    ratio = two.over(one)  # of images: a row of two is two
    assert ratio.mean >= 0.95
    record(
        "pairs", proof="rows of two images", rows_of_one_per_s=round(one.mean), rows_of_two_per_s=round(two.mean / 2),
        over_half=[round(value, 3) for value in ratio],
    )  # fmt: skip


def test_the_decoder_alone_sees_images_of_all_sizes(images: Path) -> None:
    """One large image makes small chunks; eight of them would be a few images, met again and again."""
    data = DataConfig(source="folder", root=str(images))
    config = Config(data=data, pipelines=PipelinesConfig(batch=2))
    with make_endless_loader(load_index(data), config, 16, CPU) as loader:
        seen = np.concatenate([chunk.samples for chunk in first_chunks(loader, 48)])
    assert len(np.unique(seen)) == 48


def test_too_few_images_are_reported(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("peclr_dali.bench.loaders.compare.compare_loaders", never)
    assert run_cli("bench-loader", *of(images), "--batch", "64") == 2
    assert "48 images, fewer than --batch = 64: use more images or a smaller batch" in capsys.readouterr().err


def test_bad_files_are_reported_before_anything_is_measured(images: Path) -> None:
    paths = sorted(images.iterdir())
    require_sound(paths)
    (images / "03.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"03\.jpg: cannot be used .*data\.bad_list="):
        require_sound(paths)
    (images / "03.jpg").unlink()
    with pytest.raises(UserError, match=r"03\.jpg: cannot be used \(No such file or directory\)"):
        require_sound(paths)


def test_packed_data_is_measured(images: Path, tmp_path: Path) -> None:
    source = DataConfig(source="folder", root=str(images), box_margin=1.0)
    pack(load_index(source), tmp_path / "shards", per_shard=20, workers=1)
    config = Config(data=DataConfig(source="shards", root=str(tmp_path / "shards")))
    rounds = Rounds(repeats=2, repeat_s=0.05, warmup_s=0.05)
    found = compare_loaders(config, rounds, batch=16, peers=True, device=CPU, progress=print)
    assert [entry["name"] for entry in found["loaders"]] == ["this loader"]
    assert found["loaders"][0]["images_per_s"] > 0
    assert found["verdict"].startswith("The loader makes")


def test_large_frames_are_what_the_folder_source_takes(images: Path, tmp_path: Path) -> None:
    index = load_index(DataConfig(source="folder", root=str(images)))
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


@pytest.mark.parametrize(
    ("ours_ms", "busy", "stages", "expected"),
    [
        (0.37, 2.0, {}, "The loader makes 5000 images/s; the processor limits it (100% of 2 cores busy)"),
        (0.37, 2.0, {}, "decoding takes 54% of its time"),  # 0.20 of 0.03 + 0.20 + 0.14
        (0.92, 2.0, {}, "making views takes 75% of its time: change to more cores"),
        (0.75, 2.0, {"read": (9.0, 0.52)}, "reading takes 69% of its time: change to fewer and larger files"),
        (0.2, 2.0, {}, "decoding takes 87% of its time"),  # parts that cost more alone leave nothing for the views
        (0.37, 0.9, {}, "no core limits it (45% of 2 busy) but waiting; the part 'decode only' alone makes 9000"),
        (0.37, 0.9, {}, "pipelines.threads"),
    ],
)
def test_the_verdict_names_the_limit(
    ours_ms: float, busy: float, stages: dict[str, tuple[float, float]], expected: str
) -> None:
    """A loader on 2 cores; `stages`: images/s and CPU ms of an image."""
    parts = {"read": (40000.0, 0.03), "decode": (9000.0, 0.20), **stages}
    row = {
        "machine": {"cores": 2},
        "settings": {},
        "loaders": [{"images_per_s": 5000.0, "cpu_ms_per_image": ours_ms, "cores_busy": busy}],
        "stages": [
            {"name": f"{name} only", "images_per_s": part[0], "cpu_ms_per_image": part[1]}
            for name, part in parts.items()
        ],
    }
    assert expected in verdict(row)
    assert "makes 5000 images/s, which is 2500 pairs/s; " in verdict(row | {"images_per_row": 2})

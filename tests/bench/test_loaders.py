"""The benchmark as a whole, at toy size: everything is measured, and the row says on what."""

import dataclasses
import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from peclr_dali import DataConfig, PipelinesConfig, UserError, World
from peclr_dali.bench.loaders import PEERS, OurLoader, checked_files, compare_loaders, table_of, verdict
from peclr_dali.bench.measure import Rounds
from peclr_dali.bench.rows import read_rows
from peclr_dali.pipelines.samples.partners import of_pairs
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.train.config.pretraining import Config
from tests.command_line import as_options, run_cli
from tests.train.tiny_run import ROOT, write_images

CPU = World().device


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", count=48)


@pytest.mark.slow  # measures every peer
def test_everything_is_measured_and_printed(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "rows" / "loader.jsonl"
    keys = as_options(["data.source=folder", f"data.root={images}", "train.device=cpu"])
    quick = ["--batch", "16", "--repeats", "2", "--seconds", "0.1", "--record", str(record)]
    assert run_cli("bench-loader", *keys, *quick) == 0
    row = json.loads(record.read_text())
    everything = [*row["loaders"], *row["stages"]]
    assert [entry["name"] for entry in row["loaders"]] == ["this loader", *PEERS]
    assert [entry["name"] for entry in row["stages"]] == ["read only", "decode only"]
    assert all(entry["images_per_s"] > 0 for entry in everything)
    assert all(0 < entry["cores_busy"] < row["machine"]["cores"] + 0.5 for entry in row["loaders"])
    assert (row["card"], row["decoder"], row["views"]) == ("none", "cpu", "cpu")
    assert row["loaders"][0]["ours_is"] == [1, 1, 1]
    assert {"date", "cpu", "cores", "torch", "nvidia-dali-cuda120", "commit"} <= row["machine"].keys()
    assert row["verdict"] in capsys.readouterr().out


def test_both_images_of_a_pair_are_counted(images: Path) -> None:
    """The partner of image n is image n + 24, modulo 48."""
    data = DataConfig(source="folder", root=str(images))
    index, rows = load_index(data), np.arange(48)
    index = dataclasses.replace(index, partners=of_pairs(np.stack([rows, (rows + 24) % 48], axis=1), 48))
    ours = OurLoader(index, Config(data=(data,), pipelines=PipelinesConfig(threads=1)), 16, CPU)
    for batches in (ours.batches(), ours.read_only(), ours.decode_only()):
        assert next(batches) == 32
        batches.close()


def test_files_are_checked_before_anything_is_measured(images: Path, tmp_path: Path) -> None:
    """Peers get a square for each whole image."""
    cv2.imwrite(str(images / "wide.png"), np.zeros((20, 60, 3), np.uint8))
    index = load_index(DataConfig(source="folder", root=str(images)))
    assert checked_files(index, 128).boxes_px.tolist() == [[24, 24, 48]] * 48 + [[30, 10, 60]]
    (images / "03.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"03\.jpg: cannot be used\. .*data\.bad_list="):
        checked_files(index, 128)


def test_packed_data_is_measured(images: Path, tmp_path: Path) -> None:
    source = DataConfig(source="folder", root=str(images), box_margin=1.0)
    pack(load_index(source), tmp_path / "shards", per_tar=20, workers=1)
    config = Config(data=(DataConfig(source="shards", root=str(tmp_path / "shards")),))
    ours = OurLoader(load_index(config.data), config, 16, CPU)
    row = compare_loaders(ours, Rounds(repeats=2, repeat_s=0.05, warmup_s=0.05), peers=True, progress=print)
    assert [entry["name"] for entry in row["loaders"]] == ["this loader"]


def test_the_verdict_says_what_limits_the_loader() -> None:
    stages = [{"cpu_ms_per_image": 0.03}, {"cpu_ms_per_image": 0.20}]
    ours = {"cpu_ms_per_image": 0.37, "cores_busy": 1.94}
    row = {"machine": {"cores": 2}, "loaders": [ours], "stages": stages}
    assert verdict(row).startswith("97% of 2 cores are busy, so the processor limits it.")
    assert "reading 8%, decoding 54%, making views 38%" in verdict(row)
    ours |= {"cpu_ms_per_image": 0.2, "cores_busy": 0.9}  # the parts cost more alone: no time for views
    assert "does not limit it. The processor's time: reading 13%, decoding 87%, making views 0%" in verdict(row)


def test_the_page_holds_a_row_as_it_is_printed() -> None:
    row = read_rows(ROOT / "bench" / "results" / "loader.jsonl")[8]
    assert table_of(row) in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

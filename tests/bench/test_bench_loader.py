"""The benchmark as a whole, in little: every loader is measured, and the row says on what."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.loader import Settings, as_json, as_table, bench_loader
from bench.peers import installed_peers
from errors import UserError
from pipelines.sources import DataConfig
from tests.train.tiny_run import write_images
from train.config import Config


@pytest.mark.slow
def test_every_loader_is_measured(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=48)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    settings = Settings(cores=1, batch=16, repeats=2, repeat_s=0.1, warmup_s=0.1)
    rows = bench_loader(config, settings)
    assert [row.name for row in rows[1:]] == [peer.name for peer in installed_peers()]
    assert all(row.rate.mean > 0 for row in rows)

    row = json.loads(json.dumps(as_json(rows, config, settings)))
    assert {"date", "cpu", "cores", "torch", "nvidia-dali-cuda120", "commit"} <= row["machine"].keys()
    ours = row["loaders"][0]
    assert ours["views_per_s"] == pytest.approx(2 * ours["images_per_s"], rel=1e-3)
    low, high = ours["interval"]
    assert low <= ours["images_per_s"] <= high

    assert ours["ours_is"] == [1, 1, 1]
    assert all(loader["memory_mib"] > 50 and 0 < loader["cores_busy"] < 1.5 for loader in row["loaders"])

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_table(rows, settings))
    assert "this loader" in console.export_text()


def test_too_few_images_or_cores_are_told(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=4)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    with pytest.raises(UserError, match="4 images, fewer than a batch of 16"):
        bench_loader(config, Settings(cores=1, batch=16))
    with pytest.raises(UserError, match="--cores 4096"):
        bench_loader(config, Settings(cores=4096, batch=2))

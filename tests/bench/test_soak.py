"""What a soak holds against a loader."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.loaders import soak
from bench.loaders.ours import LoaderSettings, our_batches
from pipelines.config import DataConfig
from tests.train.tiny_run import write_images
from train.config.pretraining import Config


@pytest.mark.parametrize(
    ("before", "after", "steady"),
    [
        ((1000, 40), (1019, 40), True),
        ((1000, 40), (1021, 40), False),
        ((1000, 40), (979, 40), False),
        ((1000, 40), (1000, 39), True),
        ((1000, 40), (1000, 41), False),
    ],
)
def test_verdict(before: tuple[float, int], after: tuple[float, int], steady: bool) -> None:
    row = {"seconds": 3600, "images": 1, **soak.judge((60, *before), (3600, *after))}
    assert row["steady"] is steady
    assert ("expected" in soak.summary(row)) is not steady


def test_loader_is_steady_and_a_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", count=48)
    config = Config(data=DataConfig(source="folder", root=str(tmp_path / "images")))
    settings = LoaderSettings(cores=1, batch=16)
    monkeypatch.setattr(soak, "_LAG_S", 0.2)
    ticks = itertools.count()  # a clock of the batches, so that a busy machine makes as many
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 50, sleep=time.sleep)
    monkeypatch.setattr(soak, "time", clock)
    clean = json.loads(json.dumps(soak.soak(config, settings, 1)))
    assert clean["images"] > 0
    assert clean["end"][2] <= clean["settled"][2]
    assert len(clean["history"]) > 1  # of every tenth look
    assert clean["images_per_s"] == pytest.approx(clean["images"] / clean["seconds"], abs=0.1)

    real, kept = our_batches, list[Any]()

    def leaking(*arguments: Any) -> Generator[int]:
        for count in real(*arguments):
            # more memory than malloc may have kept of the run before
            kept.extend([os.open("/dev/null", os.O_RDONLY), bytearray(b"x") * (8 << 20)])
            yield count

    monkeypatch.setattr(soak, "our_batches", leaking)
    leaky = soak.soak(config, settings, 1)
    assert leaky["end"][2] > leaky["settled"][2]
    assert leaky["memory_growth"] > 2 * abs(clean["memory_growth"])
    assert not leaky["steady"]
    for file in kept[::2]:
        os.close(file)

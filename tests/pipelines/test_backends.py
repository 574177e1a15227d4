"""How a backend is set up, and what it refuses."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from machine import decoder_memory
from pipelines.config import PipelinesConfig
from pipelines.files.check import check_image
from pipelines.files.image_file import ImageFile
from pipelines.render import backends
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from pipelines.views.draws import draw_view
from tests.pipelines import harness

ROOT = Path(__file__).parents[2]
Image = harness.Image
TOLD = 'CPU decoder set up (pipelines.decoder_memory = "auto"): '


@pytest.mark.parametrize(
    ("memory", "device", "backend", "prepared"),
    [
        ("auto", "cpu", "auto", True),
        ("auto", "cpu", "dali", True),
        ("auto", "cuda", "auto", False),
        ("auto", "cuda", "dali", False),
        ("auto", "cuda", "opencv", True),
        ("off", "cpu", "auto", False),
        ("off", "cuda", "auto", False),
        ("off", "cuda", "opencv", False),
    ],
)
def test_a_process_is_set_up_only_for_a_decoder_on_its_cpu(
    memory: Literal["auto", "off"],
    device: str,
    backend: Literal["auto", "dali", "opencv"],
    prepared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(backends, "prepare_decoder_memory", lambda: calls.append("prepared"))
    backends.prepare_process(PipelinesConfig(decoder_memory=memory, backend=backend), torch.device(device))
    assert calls == ["prepared"] * prepared


@pytest.mark.parametrize(
    ("kept", "in_cache", "done"),
    [
        (True, True, "malloc reuses memory, cached JPEG rows"),
        (False, True, "cached JPEG rows"),
        (False, False, "not possible here"),
    ],
)
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_what_is_set_up_is_logged_once_on_rank_0(
    kept: bool,
    in_cache: bool,
    done: str,
    rank: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(decoder_memory, "keep_freed_memory", lambda: kept)
    monkeypatch.setattr(decoder_memory, "keep_decoded_in_cache", lambda: in_cache)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    caplog.set_level(logging.INFO)
    decoder_memory.prepare_decoder_memory.cache_clear()
    try:
        for _ in range(2):
            backends.prepare_process(PipelinesConfig(), torch.device("cpu"))
    finally:
        decoder_memory.prepare_decoder_memory.cache_clear()
    assert caplog.messages == ([] if rank == "1" else [TOLD + done])


@pytest.mark.parametrize("command", ["views", "check-data"])
def test_commands_log_what_they_set_up(command: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        image = harness.smooth_image(np.random.default_rng(number), 40, 40)
        (tmp_path / "images" / f"{number}.png").write_bytes(harness.encode(image).tobytes())
    out = tmp_path / ("views.png" if command == "views" else "bad.jsonl")
    settings = ("data.source=folder", f"data.root={tmp_path / 'images'}", "train.device=cpu")
    overrides = [word for setting in settings for word in ("--set", setting)]
    words = [sys.executable, "cli.py", command, "-c", "configs/demo.toml", *overrides, str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr.count(TOLD) == 1


@pytest.mark.parametrize("more", [-1, 1])
def test_a_header_with_another_size_than_the_decoded_image_is_refused(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(data: Image) -> ImageFile:
        file = check_image(data)
        height, width = file.size_px
        return file._replace(size_px=(height, width + more))

    geometry, colour = GeometryConfig(side_px=16), ColourConfig(jitter="none")
    images = [harness.smooth_image(np.random.default_rng(0), 40, 50)] * 2
    box_px = np.array([[20, 20, 30]] * 2, np.float32)
    draws = [draw_view(Augmentation(geometry, colour), seed=0, epoch=0, view=0, places=np.arange(2))]
    monkeypatch.setattr(harness, "check_image", check)
    with pytest.raises(RuntimeError, match=r"(?s)40 50\].* their headers say .*40 " + str(50 + more)):
        harness.make_views("opencv", images, box_px, draws, geometry, colour)

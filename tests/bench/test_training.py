"""`bench-train`: what is measured is the step that trains."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from peclr_dali import Batch, World
from peclr_dali.bench import training
from peclr_dali.bench.measure import Rounds
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from tests.command_line import as_options, run_cli
from tests.train.tiny_run import TINY, write_images

QUICK = Rounds(repeats=2, repeat_s=0.01, warmup_s=0.0)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    write_images(tmp_path / "images", count=24)
    return [*TINY, f"data.root={tmp_path / 'images'}"]


def test_a_row_has_what_a_table_of_cards_says(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with an overlay of a card, whose keys `--set` changes."""
    record = tmp_path / "train.jsonl"
    keys = as_options([*settings, "pipelines.views=dali", "train.precision=fp32"])
    quick = ["--repeats", "2", "--seconds", "0.1", "--record", str(record)]
    assert run_cli("bench-train", "-c", "configs/cards/rtx_11gb.toml", *keys, *quick) == 0
    row = json.loads(record.read_text())
    assert row["files"] == ["rtx_11gb"]
    assert (row["card"], row["device"], row["decoder"], row["views"]) == ("none", "cpu", "cpu", "dali")
    assert (row["precision"], row["computed_twice"], row["device_memory_mib"]) == ("fp32", "0 of 3", None)
    assert 0 <= row["waited_share"] < 1
    assert row["peak_memory_mib"] > 100
    assert row["config"]["encoder"]["name"] == "resnet18"
    for way in ("in_memory", "with_loader"):
        assert len(row[way]["repeats"]) == 2
        assert row[way]["images"] % row["config"]["train"]["batch"] == 0
    assert re.search(r"\| card +\| cpu +\|", capsys.readouterr().out)


@pytest.mark.parametrize(("loading_s", "stepping_s", "waits"), [(0.05, 0.0, True), (0.0, 0.05, False)])
def test_waiting_is_the_time_until_a_batch_arrives(
    loading_s: float, stepping_s: float, waits: bool, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Config, [], settings)
    bench = training.StepBench(config, load_index(config.data), World())

    def batches() -> Iterator[Batch]:
        while True:
            time.sleep(loading_s)
            yield bench.batches[0]

    monkeypatch.setattr(bench, "_make_loader", lambda: nullcontext(batches()))
    monkeypatch.setattr(bench, "step", lambda batch: time.sleep(stepping_s))
    steps = bench.with_loader()
    for _ in range(8):
        next(steps)
    waited_share = bench.waited_s / bench.looped_s
    assert waited_share > 0.9 if waits else waited_share < 0.1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # fp16 may skip its first step
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu(precision: str, settings: list[str]) -> None:
    config = load_config(Config, [], [*settings, "train.device=cuda", f"train.precision={precision}"])
    row = training.bench_train(config, [], QUICK, print)
    assert row["device"].startswith("cuda")
    assert row["card"] == row["machine"]["gpu"]
    assert 0 < row["peak_memory_mib"] < row["device_memory_mib"]

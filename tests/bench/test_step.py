"""`bench-train`: what is measured is the step that trains."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.bench.measure import Rate, Rounds
from peclr_dali.bench.training import report, step
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from tests.command_line import run_cli
from tests.train.tiny_run import TINY, write_images

ALL = {"cached", "loaded", "gradient", "averaged"}
QUICK = Rounds(repeats=2, repeat_s=0.01, warmup_s=0.0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_images(tmp_path / "images", count=24)
    return load_config(Config, [], [*TINY, f"data.root={tmp_path / 'images'}"])


def with_train(config: Config, **changed: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changed))


def bench_of(config: Config, precision: str = "fp64") -> step.StepBench:
    in_precision = with_train(config, precision=precision)
    return step.StepBench(in_precision, load_index(config.data), World(), QUICK)


def gradients(bench: step.StepBench) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in bench.state.network.parameters() if p.grad is not None]).clone()


def test_figures_of_a_step(config: Config) -> None:
    row = json.loads(json.dumps(step.bench_train(config, QUICK, print)))
    (figures,) = row["precisions"]
    assert figures["images_per_s"].keys() == ALL
    assert 0 <= figures["waited_share"] < 1
    assert figures["peak_memory_mib"] > 100
    assert figures["device_memory_mib"] is None
    assert row["config"]["train"]["batch"] == figures["batch"] == 12
    shown = [*report.lines(row)]
    assert ("peak memory (MiB)", str(figures["peak_memory_mib"])) in shown
    assert shown[-1][1].endswith(" x")


@pytest.mark.slow  # measures for some seconds
def test_the_command_prints_and_records(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(config.data, DataConfig)
    words = [word for setting in (*TINY, f"data.root={config.data.root}") for word in ("--set", setting)]
    record = tmp_path / "train.jsonl"
    assert run_cli("bench-train", *words, "--repeats", "2", "--seconds", "0.1", "--record", str(record)) == 0
    assert json.loads(record.read_text())["precisions"][0]["images_per_s"].keys() == ALL
    printed = capsys.readouterr().out
    assert "optimiser's share" in printed
    assert "batches of 12 in micro-batches of 4" in printed


def test_operations_are_counted_forward_and_backward(config: Config) -> None:
    # Of a ResNet-18: 1.8186e9 multiply-adds at 224 pixels (torchvision), nearly all of which grow with the area;
    # the backward pass takes as much again for weights and for inputs, but for the first layer's input.
    expected = 2 * 3 * 2 * 1.8186e9 * (32 / 224) ** 2
    assert bench_of(config, "fp32").flop_per_image() == pytest.approx(expected, rel=0.1)


def test_averaging_one_batch_is_the_exact_gradient_and_averaging_several_is_not(config: Config) -> None:
    whole = bench_of(with_train(config, micro_batch=12))
    batch = whole.batches[0]
    whole.state.gradient(batch)
    exact = gradients(whole)
    whole._averaged(batch)
    torch.testing.assert_close(gradients(whole), exact, rtol=1e-9, atol=1e-12)

    parts = bench_of(config)
    parts.state.gradient(batch)
    exact = gradients(parts)
    parts._averaged(batch)
    assert not torch.allclose(gradients(parts), exact, rtol=0.01)


def test_every_way_takes_a_whole_step(config: Config) -> None:
    bench = bench_of(config)
    weights = next(iter(bench.state.network.parameters()))
    before = weights.detach().clone()
    bench._with_gradient(bench._averaged)(bench.batches[0])
    assert not torch.equal(weights, before)


@pytest.mark.parametrize(("loading_s", "stepping_s", "waits"), [(0.05, 0.0, True), (0.0, 0.05, False)])
def test_waiting_is_the_time_until_a_batch_arrives(
    loading_s: float, stepping_s: float, waits: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(config)

    @contextmanager
    def loader() -> Iterator[Iterator[Batch]]:
        def batches() -> Iterator[Batch]:
            while True:
                time.sleep(loading_s)
                yield bench.batches[0]

        yield batches()

    monkeypatch.setattr(bench, "_loader", loader)
    monkeypatch.setattr(bench.state, "step", lambda batch: time.sleep(stepping_s))
    steps = bench.loaded()
    for _ in range(8):
        next(steps)
    waited_share = bench._waited_s / bench._looped_s
    assert waited_share > 0.9 if waits else waited_share < 0.1


def test_shares_in_closed_form() -> None:
    def rate(images_per_s: float) -> Rate:
        return Rate((images_per_s, images_per_s), 0.0, 1)

    rates = {"cached": 50, "loaded": 45, "gradient": 100, "averaged": 50}
    figures = step.figures_of({name: rate(images_per_s) for name, images_per_s in rates.items()}, 100, 2e9)
    assert figures["step_s"][0] == pytest.approx(2)
    assert figures["optimizer_share"] == pytest.approx(0.5)
    assert figures["loader_share"] == pytest.approx(0.1)
    assert figures["model_flop_per_s"] == pytest.approx(1e11)


def test_too_few_images_are_reported(config: Config) -> None:
    with pytest.raises(UserError, match=r"24 images, fewer than train.batch = 48"):
        step.bench_train(with_train(config, batch=48), QUICK, print)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # fp16 may skip its first step
def test_on_a_gpu(config: Config) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        (one,) = step.bench_train(with_train(config, device="cuda", precision=precision), QUICK, print)["precisions"]
        assert one["device"].startswith("cuda")
        assert one["device_memory_mib"] is not None
        assert 0 < one["peak_memory_mib"] < one["device_memory_mib"]

"""`bench-train`: what is measured is the step that trains."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import measure
from bench.measure import Rate, Rounds, Start
from bench.training import step
from bench.training.report import as_json, as_table
from errors import UserError
from pipelines.batch import Batch
from pipelines.sources import load_index
from tests.train.tiny_run import TINY, write_images
from train.config.load import load_config
from train.config.pretraining import Config
from train.distributed.world import World

ALL = {"cached", "loaded", "gradient", "recomputed", "averaged", "plain"}
QUICK = step.StepSettings(repeats=2, repeat_s=0.01, warmup_s=0.0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_images(tmp_path / "images", count=24)
    return load_config(Config, [], [*TINY, f"data.root={tmp_path / 'images'}"])


def bench_of(config: Config, precision: str = "fp64") -> step.StepBench:
    in_precision = step.with_train(config, precision=precision)
    return step.StepBench(in_precision, load_index(config.data), World(), QUICK)


@pytest.fixture
def one_step_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it counts which ways are timed, and not how long they take."""

    def repeat(start: Start, rounds: Rounds) -> measure._Repeat:
        batches = start()
        images = next(batches)
        assert isinstance(batches, Generator)
        batches.close()
        return images, 1.0, 1.0, 1.0

    monkeypatch.setattr(measure, "_repeat", repeat)
    monkeypatch.setattr(step, "_SETTLING_STEPS", 0)


def gradients(bench: step.StepBench) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in bench.state.network.parameters() if p.grad is not None]).clone()


@pytest.mark.slow  # measures
def test_figures_of_two_precisions(config: Config) -> None:
    told: list[tuple[int, int]] = []
    figures = step.bench_train(config, ["fp32", "bf16"], QUICK, lambda done, total: told.append((done, total)))
    assert [one["precision"] for one in figures] == ["fp32", "bf16"]
    assert told[-1] == (24, 24)
    for one in figures:
        assert one["images_per_s"].keys() == ALL
        assert 0 <= one["waited_share"] < 1
        assert one["peak_memory_mib"] > 100
        assert one["device_memory_mib"] is None
    row = json.loads(json.dumps(as_json(figures, config, QUICK)))
    assert row["precisions"][1]["images_per_s"].keys() == ALL
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(as_table(figures))
    assert "optimiser's share" in console.export_text()


def test_operations_are_counted_forward_and_backward(config: Config) -> None:
    # Of a ResNet-18: 1.8186e9 multiply-adds at 224 pixels (torchvision), nearly all of which grow with the area;
    # the backward pass takes as much again for weights and for inputs, but for the first layer's input.
    expected = 2 * 3 * 2 * 1.8186e9 * (32 / 224) ** 2
    assert bench_of(config, "fp32").flop_per_image() == pytest.approx(expected, rel=0.1)


def test_averaging_one_batch_is_the_exact_gradient_and_averaging_several_is_not(config: Config) -> None:
    whole = bench_of(step.with_train(config, micro_batch=12))
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


def test_ways_of_the_exact_step_agree(config: Config) -> None:
    bench = bench_of(config)
    batch = bench.batches[0]
    bench.state.gradient(batch)
    exact = gradients(bench)
    bench._exact(4, "always")(batch)
    torch.testing.assert_close(gradients(bench), exact, rtol=1e-9, atol=1e-12)


def test_every_way_takes_a_whole_step(config: Config) -> None:
    bench = bench_of(config)
    weights = next(iter(bench.state.network.parameters()))
    before = weights.detach().clone()
    bench._with_gradient(bench._averaged)(bench.batches[0])
    assert not torch.equal(weights, before)


@pytest.mark.usefixtures("one_step_a_repeat")
def test_a_batch_that_does_not_fit_is_left_out(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.training.step.free_bytes", lambda world: 1000)
    told: list[tuple[int, int]] = []
    (figures,) = step.bench_train(config, ["fp32"], QUICK, lambda done, total: told.append((done, total)))
    assert told[-1] == (10, 10)
    assert figures["images_per_s"].keys() == ALL - {"plain"}
    assert "not measured" in dict(enumerate(as_table([figures]).columns[1].cells)).values()


@pytest.mark.usefixtures("one_step_a_repeat")
def test_comparisons_with_the_exact_batch_may_be_left_out(config: Config) -> None:
    told: list[tuple[int, int]] = []
    few = dataclasses.replace(QUICK, comparisons=False)
    (figures,) = step.bench_train(config, ["fp32"], few, lambda done, total: told.append((done, total)))
    assert told[-1] == (6, 6)
    assert figures["images_per_s"].keys() == {"cached", "loaded", "gradient"}
    row = as_json([figures], config, few)
    assert row["precisions"][0]["images_per_s"].keys() == {"cached", "loaded", "gradient"}
    assert list(as_table([figures]).columns[1].cells).count("not measured") == 3


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

    rates = {"cached": 50, "loaded": 45, "gradient": 100, "recomputed": 40, "averaged": 50}
    figures = step.figures_of({name: rate(images_per_s) for name, images_per_s in rates.items()}, 100, 2e9)
    assert figures["step_s"][0] == pytest.approx(2)
    assert figures["optimizer_share"] == pytest.approx(0.5)
    assert figures["loader_share"] == pytest.approx(0.1)
    assert figures["model_flop_per_s"] == pytest.approx(1e11)


def test_too_few_images_are_reported(config: Config) -> None:
    with pytest.raises(UserError, match=r"24 images, fewer than train.batch = 48"):
        step.bench_train(step.with_train(config, batch=48), ["fp32"], QUICK)


def test_step_alone_for_the_verdict_has_the_threads_of_training(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert step.cached_rate(config, QUICK).mean > 0
    assert threads == [config.train.threads]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # fp16 may skip its first step
def test_on_a_gpu(config: Config) -> None:
    on_gpu = step.with_train(config, device="cuda")
    for one in step.bench_train(on_gpu, ["fp32", "bf16", "fp16"], QUICK):
        assert one["device"].startswith("cuda")
        assert one["device_memory_mib"] is not None
        assert 0 < one["peak_memory_mib"] < one["device_memory_mib"]

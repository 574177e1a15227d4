"""The model of scaling, on timings that follow from it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.documentation import fill_tables
from bench.training.scaling import (
    Cluster,
    Link,
    ScalingTimes,
    Work,
    fit_link,
    project_step,
    sum_s,
    this_machine,
    work_of,
)
from tests.command_line import run_cli
from tests.train.tiny_run import TINY
from train.config.load import load_config
from train.config.pretraining import Config

WORK = Work(batch=2048, micro_batch=128, embedding_dim=128, parameters=25_000_000)
ROOT = Path(__file__).parents[2]


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(2, 64))
def test_the_fit_finds_the_link_that_made_the_timings(latency_s: float, bytes_per_s: float, ranks: int) -> None:
    sizes = [4**power for power in range(2, 15)]
    hops = 2 * (ranks - 1)
    sums = [(size, hops * (latency_s + size / ranks / bytes_per_s)) for size in sizes]
    link = fit_link(sums, ranks)
    assert link.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)


def test_too_little_to_fit() -> None:
    with pytest.raises(ValueError, match="1 sizes over 4 ranks"):
        fit_link([(16, 1e-5)], 4)


def test_small_sums_cost_latency_and_large_ones_bandwidth() -> None:
    link = Link(1e-5, 1e10)
    assert sum_s(1e9, 1, link) == 0
    assert sum_s(0, 64, link) == pytest.approx(2 * 6 * 1e-5)  # a tree
    assert sum_s(1e10, 64, link) == pytest.approx(2 * 63 / 64, rel=2e-3)  # a ring


def test_without_cost_of_exchange_nothing_is_lost() -> None:
    free = Link(1e-12, 1e18)
    cluster = Cluster(gpus_per_node=8, inside=free, between=free, micro_batch_s=0.1, fixed_s=0.0)
    for nodes in (1, 2):
        row = project_step(WORK, cluster, nodes)
        assert row.step_s == pytest.approx(1.6 / row.ranks)
        assert row.efficiency == pytest.approx(1)


def test_what_limits_is_named() -> None:
    ideal = Cluster(8, Link(1e-12, 1e18), Link(1e-12, 1e18), micro_batch_s=0.1, fixed_s=0.0)
    assert project_step(WORK, dataclasses.replace(ideal, between=Link(1e-9, 1e9)), 2).limit == "sum of gradients"
    few = dataclasses.replace(WORK, parameters=1000)
    assert project_step(few, dataclasses.replace(ideal, between=Link(1e-4, 1e18)), 2).limit == "exchange of embeddings"
    assert project_step(WORK, dataclasses.replace(ideal, fixed_s=0.05), 2).limit == "fixed cost of a step"
    odd = project_step(WORK, dataclasses.replace(ideal, gpus_per_node=3), 1)
    assert odd.limit == "uneven numbers of micro-batches"
    assert odd.step_s == pytest.approx(0.6)  # six micro-batches on one of three ranks
    slow_disk = dataclasses.replace(ideal, image_bytes=1e6, storage_bytes_per_s=1e9)
    assert project_step(WORK, slow_disk, 2).limit == "storage"
    assert project_step(WORK, slow_disk, 2).step_s == pytest.approx(2.048)


def test_more_ranks_than_micro_batches_have_no_work() -> None:
    row = project_step(WORK, Cluster(gpus_per_node=8), 100)
    assert (row.ranks, row.nodes) == (16, 2)


def test_the_model_gives_back_what_it_was_measured_on() -> None:
    link = Link(5e-5, 2e9)
    sums = [(4**power, sum_s(4**power, 2, link)) for power in range(2, 13)]
    here = this_machine(ScalingTimes(2, sums, micro_batch_s=0.2, fixed_s=0.03, step_s=math.nan))
    step = project_step(WORK, here, 1)
    assert step.ranks == 2
    assert step.step_s == pytest.approx(
        8 * 0.2 + 0.03 + 2 * sum_s(2 * 2048 * 128 * 4, 2, link) + sum_s(1e8, 2, link), rel=1e-3
    )


def test_sizes_come_from_the_configuration() -> None:
    config = load_config(Config, [], ["train.batch=64", "train.micro_batch=16", "encoder.name=resnet18"])
    work = work_of(config)
    assert (work.batch, work.micro_batch, work.embedding_dim) == (64, 16, config.projector.dim)
    assert 11_000_000 < work.parameters < 12_000_000


def test_the_command_measures_projects_and_says_that_it_projects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    words = [word for setting in TINY for word in ("--set", setting)]
    record = tmp_path / "scaling.jsonl"
    cluster = str(ROOT / "launch" / "cluster.toml")
    command = ["bench-scale", *words, "--cluster", cluster, "--nodes", "1,2", "--repeats", "1", "--record", str(record)]
    assert run_cli(*command) == 0
    assert "PROJECTION, not a measurement" in capsys.readouterr().out
    row = json.loads(record.read_text())
    assert row["measured"]["ranks"] == 1
    assert row["measured"]["step_s"] > 0
    assert row["error_here"] == pytest.approx(row["step_s_predicted_here"] / row["measured"]["step_s"] - 1)
    assert row["errors_of_sums"] == []
    tables = "<!-- rows: scaling-error -->\n<!-- end rows -->\n"
    assert "No row yet." in fill_tables(tables, tmp_path / "nowhere")
    made = fill_tables(tables, tmp_path)
    assert (
        f"| {row['measured']['step_s']:.3f} | {row['step_s_predicted_here']:.3f} | {row['error_here']:+.0%} |" in made
    )
    assert row["cluster"]["gpus_per_node"] == 8
    assert [entry["nodes"] for entry in row["projection"]] == [1]  # three micro-batches keep three GPUs busy
    assert run_cli("bench-scale", "--nodes", "1,x") == 2
    assert "--nodes 1,x: expected numbers" in capsys.readouterr().err

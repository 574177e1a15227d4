"""Whole runs: killed and resumed, on one process and on two."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.train import tiny_run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "images"
    tiny_run.write_images(root)
    return root


@pytest.fixture(scope="module")
def uninterrupted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, out, resume="never")))
    return out


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = tiny_run.final_weights(one), tiny_run.final_weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_run_folder_holds_what_it_promises(uninterrupted: Path) -> None:
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {
        "config.toml",
        "versions.json",
        "metrics.jsonl",
        "checkpoints",
        "views.png",
        "loss.png",
        "tensorboard",
    }
    rows = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert {"loss", "lr", "images_per_s", "wait_share", "alignment", "uniformity", "positive_rank"} <= rows[0].keys()
    assert len(list((uninterrupted / "checkpoints").iterdir())) == 3
    samples = tiny_run.samples_of_steps(uninterrupted)
    for epoch in range(3):
        seen = [sample for step in range(4 * epoch + 1, 4 * epoch + 5) for sample in samples[step]]
        assert len(set(seen)) == 48


def test_killed_at_random_steps_and_resumed_the_weights_are_the_same_bits(
    images: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    moment = random.Random(os.urandom(8))
    kills = 0
    for _ in range(2):
        process = tiny_run.start(tiny_run.arguments(images, out))
        target = moment.randrange(1 + 5 * kills, 6 + 5 * kills)
        log = out / "samples-rank0.jsonl"
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= target):
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills > 0
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, out)))
    assert_same_weights(uninterrupted, out)
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(uninterrupted)
    metrics = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [2, 4, 6, 8, 10, 12]


def test_sigterm_saves_and_leaves(images: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    process = tiny_run.start(tiny_run.arguments(images, out))
    log = out / "samples-rank0.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, out)))
    assert_same_weights(uninterrupted, out)


def test_two_processes_train_the_same_run(images: Path, tmp_path: Path) -> None:
    """In float64, batch norm in train mode, unequal shares: 3 micro-batches over 2 ranks."""
    one, two = tmp_path / "one", tmp_path / "two"
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, one, "train.precision=fp64")))
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, two, "train.precision=fp64"), processes=2))
    assert (two / "samples-rank1.jsonl").exists()
    assert tiny_run.samples_of_steps(one) == tiny_run.samples_of_steps(two)
    torch.testing.assert_close(tiny_run.final_weights(one), tiny_run.final_weights(two), rtol=1e-9, atol=1e-11)


def test_recomputing_changes_no_bit(images: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "recomputed"
    tiny_run.finish(tiny_run.start(tiny_run.arguments(images, out, "train.recompute=always")))
    assert_same_weights(uninterrupted, out)


def test_a_loss_that_is_no_number_stops_the_run(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "nan"
    process = tiny_run.start(tiny_run.arguments(images, out, "optim.lr=1e38", "optim.clip=false"))
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 2, output
    assert "at step" in output
    assert "learning rate" in output
    assert "last good checkpoint" in output
    assert "Traceback" not in output


def test_a_run_is_not_resumed_on_other_data(uninterrupted: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    tiny_run.write_images(more, count=51)
    shutil.copytree(uninterrupted, tmp_path / "run")
    process = tiny_run.start(tiny_run.arguments(more, tmp_path / "run"))
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 2, output
    assert "is of a run on 50 images, and there are 51 now" in output

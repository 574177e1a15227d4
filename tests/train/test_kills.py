"""Killed at any moment and started again on any number of ranks, a run ends as if nothing had happened."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.conftest import Record
from tests.train import ranks, tiny_run

# Four micro-batches, so that up to four ranks have work; a checkpoint after every step, so that kills meet its writing.
# A rank that is killed before the ranks have met is waited for until the time limit.
SETTINGS = (
    "train.precision=fp64", "train.micro_batch=3", "run.checkpoint_every=1", "run.log_every=1", "run.keep=1",
    "run.rank_timeout_s=60",
)  # fmt: skip


Pretrain = Callable[[Sequence[str]], None]


def start(
    pretrain: Pretrain, images: Path, out: Path, epochs: int, world_size: int, *overrides: str
) -> list[BaseProcess]:
    settings = tiny_run.settings(images, out, *SETTINGS, f"train.epochs={epochs}", *overrides)
    return ranks.start_ranks(world_size, pretrain, settings, log=out.with_suffix(".log"))


def kill_at_random(folder: Path, pretrain: Pretrain, *, kills: int, epochs: int) -> dict[str, object]:
    """What was killed when, and how far the run ended from an undisturbed one."""
    steps = 4 * epochs
    images, whole, killed = folder / "images", folder / "whole", folder / "killed"
    tiny_run.write_images(images)
    undisturbed_run = start(pretrain, images, whole, epochs, 1, "run.checkpoint_every=1000")
    ranks.finish(undisturbed_run, whole.with_suffix(".log"), timeout_s=900)
    seed = int.from_bytes(os.urandom(4))
    chance = random.Random(seed)
    said = f"seed {seed}"
    world_sizes, writing = [], 0
    for number in range(kills):
        world_size = chance.randint(1, 4)
        processes = start(pretrain, images, killed, epochs, world_size)
        # From wherever it goes on, so that kills spread over the run however fast the machine is.
        target, extra_s = (number + 1) * steps // (kills + 4), chance.random() * 0.3
        victim = chance.choice([None, *range(world_size)])
        while processes[0].is_alive() and not (
            tiny_run.rows_of(killed) and tiny_run.rows_of(killed)[-1]["step"] >= target
        ):
            time.sleep(0.005)
        if number % 4 == 3:  # in the middle of a checkpoint
            victim, extra_s = None, 0.0
            while processes[0].is_alive() and not any((killed / "checkpoints").glob("*.part")):
                time.sleep(0.0005)
        time.sleep(extra_s)
        world_sizes.append(world_size)
        said += f"; {world_size} ranks, after step {target} + {extra_s:.2f} s, victim {victim}"
        assert processes[0].is_alive(), f"too late to be killed: {said}"
        if victim is None:  # power cut: all of them
            ranks.kill(processes)
        else:  # the others notice by themselves
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            for process in processes:
                process.join(300)
            assert not any(process.is_alive() for process in processes), said
        writing += any((killed / "checkpoints").glob("*.part"))  # half of one is left
    last = start(pretrain, images, killed, epochs, chance.randint(1, 4))
    ranks.finish(last, killed.with_suffix(".log"), timeout_s=900)

    assert [row["step"] for row in tiny_run.rows_of(killed)] == list(range(1, steps + 1)), said
    loss, undisturbed = tiny_run.rows_of(killed)[-1]["loss"], tiny_run.rows_of(whole)[-1]["loss"]
    assert loss == pytest.approx(undisturbed, abs=1e-6), said
    assert tiny_run.samples_of_steps(killed) == tiny_run.samples_of_steps(whole), said
    ours, theirs = tiny_run.final_weights(killed, steps), tiny_run.final_weights(whole, steps)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    return {
        "seed": seed,
        "steps": steps,
        "kills": kills,
        "kills_while_a_checkpoint_was_written": writing,
        "world_sizes": world_sizes,
        "final_loss": loss,
        "difference_from_undisturbed": abs(loss - undisturbed),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a file system: a checkpoint of a quarter of a gigabyte after every step."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_killed_twice(folder: Path) -> None:
    kill_at_random(folder, ranks.pretrain_slowly, kills=2, epochs=1)


@pytest.mark.slow  # five minutes: 21 starts
def test_killed_twenty_times(folder: Path, record: Record) -> None:
    figures = kill_at_random(folder, ranks.pretrain_in_full, kills=20, epochs=6)
    record("kills", precision="fp64", **figures)
    assert cast(int, figures["kills_while_a_checkpoint_was_written"]) > 0, figures

"""Lightning saves the loader's state and gives it back: a run that is killed sees what a whole one sees."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision

from peclr_dali import Batch, View
from tests.pipelines import lightning_run
from tests.pipelines.harness import write_jpegs
from tests.pipelines.lightning_run import BATCH, EPOCHS, STEPS_PER_EPOCH, Recorder, fit

Rows = dict[int, tuple[int, str]]
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice, and what it uses of torch that is deprecated


class _Killed(BaseException):
    pass


def _kill() -> None:
    raise _Killed


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jpegs(tmp_path_factory.mktemp("images"), STEPS_PER_EPOCH * BATCH + 2).root


def read_rows(run: Path) -> Rows:
    """By position; what was made again after a kill must be what it was."""
    found: Rows = {}
    for file in run.glob("rows_*.jsonl"):
        for line in file.read_text().splitlines():
            position, sample, digest = json.loads(line)
            assert found.setdefault(position, (sample, digest)) == (sample, digest)
    return found


def in_this_process(images: Path, run: Path, rank: int, world_size: int, kill_at: int, limit: int) -> bool:
    """Whether the run was killed."""
    module = Recorder(images, run / f"rows_{rank}.jsonl", rank, world_size, kill_at, _kill)
    try:
        fit(run, module, save_every=2, limit=limit)
    except _Killed:
        return True
    return False


def in_a_process(images: Path, run: Path, rank: int, world_size: int, kill_at: int, limit: int) -> bool:
    """The same of a process that SIGKILL ends."""
    assert limit == STEPS_PER_EPOCH
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([lightning_run.__name__])  # so that no process imports everything again
    process = context.Process(target=lightning_run.main, args=(images, run, rank, world_size, kill_at))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize(
    ("start", "limit"),
    [
        (in_this_process, STEPS_PER_EPOCH),
        (in_this_process, STEPS_PER_EPOCH - 1),  # Lightning then leaves each epoch early
        pytest.param(in_a_process, STEPS_PER_EPOCH, marks=pytest.mark.slow),
    ],
    ids=["whole epochs", "limited epochs", "SIGKILL"],
)
def test_killed_runs_see_the_samples_of_an_uninterrupted_run(
    images: Path, tmp_path: Path, start: Callable[[Path, Path, int, int, int, int], bool], limit: int
) -> None:
    """Killed at ten random steps, each time on another number of ranks; every second step writes a checkpoint."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    whole.mkdir()
    run.mkdir()
    fit(whole, Recorder(images, whole / "rows_0.jsonl", 0, 1, -1, _kill), save_every=100, limit=limit)
    expected = read_rows(whole)
    steps = [epoch * STEPS_PER_EPOCH + step for epoch in range(EPOCHS) for step in range(limit)]
    assert list(expected) == [step * BATCH + row for step in steps for row in range(BATCH)]

    kill_at = sorted(np.random.default_rng(0).choice(len(steps), 10, replace=False).tolist())
    for number, step in enumerate([*kill_at, -1]):
        world_size = (2, 3, 1)[number % 3]
        for rank in reversed(range(world_size)):  # rank 0 saves, so it comes last: all go on from the same checkpoint
            assert start(images, run, rank, world_size, step, limit) == (step >= 0)
        seen = {position // BATCH for position in read_rows(run)}
        assert seen == set(steps[: step + 1] if step >= 0 else steps), f"killed at {kill_at[: number + 1]}"
    assert read_rows(run) == expected


def test_lightning_converts_a_batch() -> None:
    """As it does with precision = "64-true": it writes into a copy of the dataclass."""
    view = View(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(2, 2, 3), torch.ones(2, 2, 3))
    keypoints_px = np.ones((2, 21, 2), np.float32)
    batch = Batch((view, view), torch.arange(2)[:, None].expand(-1, 2), torch.arange(2), all_keypoints_px=keypoints_px)
    converted = DoublePrecision().convert_input(batch)
    assert isinstance(converted, Batch)
    assert converted.views[1].matrix.dtype == torch.float64
    assert batch.views[1].matrix.dtype == torch.float32
    assert converted.samples.dtype == torch.int64
    assert converted.all_keypoints_px is keypoints_px
    assert converted.keypoints_px(1).dtype == torch.float64

"""The figures of a row of metrics, by a clock that the test moves, in TensorBoard too; and what is printed."""

import importlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from peclr_dali.errors import MachineError, UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.log import configure_logging
from peclr_dali.train.runs.meter import Meter
from peclr_dali.train.steps.stopwatch import Stopwatch
from tests.train.tiny_run import config_of, plain_run, rows_of

BATCH = Batch((), torch.arange(6)[:, None], torch.arange(6))


class Loop:
    """A training loop of 100 steps in which the clock alone moves."""

    def __init__(self, root: Path, world: World, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
        self.now_s, self.own_work = 0.0, Stopwatch()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        run, self.state = plain_run(root, world, "train.epochs=5", "run.tensorboard=false", *settings)
        self.folder, self.checkpointer = run.folder, Mock(waited_s=0.0)
        self.meter: Meter[Any] = Meter(
            run, self.state, self.checkpointer, self.own_work, lambda result: {"figure": 7.0}, "a run"
        )

    def step(self, wait_s: float, work_s: float, *, save_s: float = 0.0, loss: float = 1.0) -> None:
        def batches() -> Iterator[Batch]:
            self.now_s += wait_s
            yield BATCH

        self.meter.next_batch(batches())
        with self.own_work.running(torch.device("cpu")):
            self.now_s += work_s
        self.state.steps_done += 1
        self.meter.log(BATCH, SimpleNamespace(loss=torch.tensor(loss)))
        self.checkpointer.waited_s += save_s
        self.now_s += save_s


def test_a_row_measures_its_steps_and_the_eta_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eta's mean leaves out the first step, which compiles, and the pause of a validation."""
    loop = Loop(tmp_path, World(), monkeypatch)
    with loop.meter as meter:
        loop.step(5, 25)
        loop.step(1, 3, save_s=2)
        loop.step(1, 1)
        loop.step(1, 3)
        with meter.paused():
            loop.now_s += 1000
        meter.log_validation({"step": 4, "epe_px": 3.0})
        loop.step(0, 10)
        loop.step(0, 10)
    first, second, third = rows_of(tmp_path)
    assert (first["step"], first["epoch"], first["loss"], first["figure"]) == (2, 0.1, 1.0, 7.0)
    expected = {
        "images_per_s": (24 / 34, 24 / 8, 24 / 20),
        "wait_share": (6 / 34, 2 / 8, 0),
        "checkpoint_share": (0, 2 / 8, 0),
        "eta_s": (98 * 4, 96 * (4 + 8) / 3, 94 * (4 + 8 + 20) / 5),
    }
    for name, values in expected.items():
        assert [row[name] for row in (first, second, third)] == pytest.approx(values), name
    assert not first.keys() & {"slowest_rank", "wait_s_max"}
    assert loop.folder.read_validations() == [{"step": 4, "epe_px": 3.0}]
    samples = [json.loads(line) for line in (tmp_path / "samples-rank0.jsonl").read_text().splitlines()]
    assert samples[5] == {"step": 6, "first": 0, "samples": [[0], [1], [2], [3], [4], [5]]}


def test_the_eta_after_the_first_step_is_from_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, World(), monkeypatch, "run.log_every=1")
    with loop.meter:
        loop.step(1, 2)
    assert [row["eta_s"] for row in rows_of(tmp_path)] == [99 * 3]


def test_steps_ten_times_slower_than_the_fastest_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those of the start, nor a wait for a checkpoint."""
    loop = Loop(tmp_path, World(), monkeypatch, "run.log_every=1")
    with loop.meter:
        for work_s in (60, 2, 3, 19, 24, 2, 24):
            loop.step(0, work_s, save_s=100 if work_s == 3 else 0)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines() if "times as long" in line] == [
        "step 5/100  steps take 12 times as long as the fastest"
    ]


class OfThree(World):
    """Rank 0 of three; the others' figures are given."""

    def barrier(self) -> None:
        pass

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_objects(self, mine: Any) -> list[Any]:
        return [mine, (1.5, 0.5), (2.0, 0.25)]


@pytest.mark.parametrize(
    ("work_s", "slowest", "over_median"), [(7.0, 0, 16 / 6 / 2.0), (1.0, 2, 2.0 / 1.5)], ids=["this one", "another"]
)
def test_the_slowest_rank_is_the_one_with_the_most_own_time_of_an_image(
    work_s: float, slowest: int, over_median: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of work and of waiting for its data: both steps' 1 s + work over 6 images here, 1.5 s and 2 s elsewhere."""
    loop = Loop(tmp_path, OfThree(0, 3), monkeypatch)
    with loop.meter:
        loop.step(1, work_s)
        loop.step(1, work_s)
    (row,) = rows_of(tmp_path)
    assert row["slowest_rank"] == slowest
    assert row["slowest_over_median"] == pytest.approx(over_median)
    assert row["wait_s_max"] == 1.0


def test_a_run_that_has_diverged_or_lost_its_folder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, World(), monkeypatch)
    with loop.meter:
        loop.step(1, 1, loss=torch.nan)  # no row is due
        with pytest.raises(UserError, match=r"the loss is inf at step 2, .* the last good checkpoint is none"):
            loop.step(1, 1, loss=torch.inf)
        loop.step(1, 1)
        loop.folder.config_file.unlink()
        with pytest.raises(MachineError, match="was removed or cannot be reached: stopped at step 4"):
            loop.step(1, 1)
    assert rows_of(tmp_path) == []


@pytest.mark.usefixtures("narrow")
def test_tensorboard_has_the_rows_of_a_resumed_run(images: Path, tmp_path: Path) -> None:
    config = config_of(images, tmp_path / "run", "train.epochs=2", "run.checkpoint_every=4")
    pretrain(config)
    (tmp_path / "run" / "checkpoints" / "step_000000008.pt").unlink()
    pretrain(config, "auto")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("loss", "lr", "images_per_s"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({row["step"]: row[name] for row in rows_of(tmp_path / "run")})


log = logging.getLogger(__name__)


@pytest.mark.usefixtures("logging_set_back")
@pytest.mark.parametrize(("rank", "printed"), [(None, "a note\na warning\n"), ("0", "a note\na warning\n"),
                                               ("1", "")])  # fmt: skip
def test_only_rank_0_prints(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    configure_logging()
    log.info("a note")
    log.warning("a warning")
    assert capsys.readouterr().err == printed

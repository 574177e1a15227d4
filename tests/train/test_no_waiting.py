"""Between two rows of metrics the training loop asks the device for nothing. `test_gpu_step` asserts it on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed import together
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.steps.training_state import TrainingState
from tests.train import tiny_hands, tiny_run
from tests.train.no_waiting import WaitedError, no_waiting

pytestmark = pytest.mark.usefixtures("narrow")

ASKED: list[Callable[[Tensor], Any]] = [
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, float, bool, lambda t: t.nonzero(), lambda t: t[t > 0],
    lambda t: t.masked_select(t > 0), lambda t: torch.where(t > 0), torch.unique, lambda t: torch.equal(t, t),
]  # fmt: skip


@pytest.mark.parametrize("ask", ASKED)
def test_the_guard_works(ask: Callable[[Tensor], Any]) -> None:
    with no_waiting(), pytest.raises(WaitedError):
        ask(torch.ones(1))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of the trainer have the guard in their loop, except in the first and the last step; the guarded steps."""
    steps: list[int] = []
    steps_of_all_ranks = together.steps_of_all_ranks

    def guarded_steps(*arguments: Any) -> Iterator[Any]:
        waiting = steps_of_all_ranks(*arguments)
        yield next(waiting)  # measures memory, compares the recomputed embeddings, validates
        before = next(waiting)
        for batch in waiting:
            with no_waiting():  # until the loop takes the next batch
                steps.append(len(steps) + 2)
                yield before
            before = batch
        yield before  # writes a row of metrics and a checkpoint

    monkeypatch.setattr("peclr_dali.train.trainer.steps_of_all_ranks", guarded_steps)
    return steps


RARE = ("run.log_every=100", "run.checkpoint_every=100", "train.epochs=1")


def pretrain_tiny(folder: Path, *overrides: str) -> None:
    tiny_run.write_images(folder / "images")
    settings = tiny_run.settings(folder / "images", folder / "run", *RARE, "optim.warmup_epochs=0", *overrides)
    pretrain(load_config(Config, [], settings))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pretraining(precision: str, guarded: list[int], tmp_path: Path) -> None:
    pretrain_tiny(tmp_path, f"train.precision={precision}", "train.recompute=always")
    assert guarded == [2, 3]


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_finetuning(frozen: str, guarded: list[int], tmp_path: Path) -> None:
    tiny_hands.write_hands(tmp_path / "hands", 12)
    settings = tiny_hands.settings(tmp_path / "hands", tmp_path / "run", *RARE, f"train.frozen={frozen}")
    finetune(load_config(FinetuneConfig, [], settings))
    assert guarded == [2, 3, 4]


def test_a_step_that_waits_is_found(guarded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrainingState.step

    def waiting_step(self: Any, batch: Any) -> Any:
        result = step(self, batch)
        result.loss.item()
        return result

    monkeypatch.setattr(TrainingState, "step", waiting_step)
    with pytest.raises(WaitedError, match="item"):
        pretrain_tiny(tmp_path)
    assert guarded == [2]

"""A run's checkpoints: when they are due, while training goes on, and never of weights that are not finite."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpointer import Checkpointer, copy_to_host
from tests.train.tiny_run import plain_run

LOSS = torch.ones(())


class Saving:
    """A run whose checkpoints are saved after every second step."""

    def __init__(self, root: Path) -> None:
        run, self.state = plain_run(root, World(), "run.checkpoint_every=2")
        index = Index("none", root, ["0.jpg"], np.zeros((1, 3), np.float32))
        self.disk, self.draw = run.folder.checkpoints, Mock()
        self.checkpointer = Checkpointer(run, index, self.state, BadFiles(run, index), draw=self.draw)

    def step_to(self, step: int) -> Tensor:
        """Let all weights be the number of the step, and return them."""
        self.state.steps_done = step
        (weight,) = self.state.network.parameters()
        return weight.data.fill_(step)

    def saved(self) -> dict[int, float]:
        """Steps and weights."""
        paths = self.disk.paths()
        return {self.disk.step_of(path): float(torch.load(path)["network"]["weight"][0, 0]) for path in paths}


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    made = Saving(tmp_path)
    with made.checkpointer:
        yield made


def test_it_saves_when_it_is_due_when_it_is_asked_to_and_before_errors(
    saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """And goes on if the curves cannot be drawn."""
    saving.draw.side_effect = [None, ZeroDivisionError, None]
    for step in (1, 2, 3):
        saving.step_to(step)
        saving.checkpointer.save(LOSS)
    saving.checkpointer.save(LOSS, at_once=True)
    assert saving.saved() == {2: 2.0, 3: 3.0}
    assert caplog.messages == ["the curves cannot be drawn after step 3: ZeroDivisionError"]
    saving.step_to(5)
    with pytest.raises(UserError, match="no substitute"), saving.checkpointer.saved_before_errors():
        raise UserError("no substitute")
    assert saving.saved() == {2: 2.0, 3: 3.0, 5: 5.0}


@pytest.mark.parametrize(("loss", "weight"), [(torch.nan, 1.0), (1.0, torch.inf)])
def test_what_is_not_finite_is_never_saved(loss: float, weight: float, saving: Saving) -> None:
    saving.step_to(2)[0, 17] = weight
    with pytest.raises(UserError, match=r"the loss or the weights are not finite at step 2, .* checkpoint is none"):
        saving.checkpointer.save(torch.tensor(loss))
    saving.step_to(3)[0, 17] = torch.nan
    with pytest.raises(UserError, match="no substitute"), saving.checkpointer.saved_before_errors():
        raise UserError("no substitute")
    assert saving.saved() == {}


def test_an_error_of_the_disk_is_raised_once(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be room again."""
    saving.step_to(2)
    monkeypatch.setattr(saving.disk, "save", Mock(side_effect=OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        saving.checkpointer.save(LOSS, at_once=True)
    monkeypatch.undo()
    saving.checkpointer.raise_failure()
    saving.step_to(4)
    saving.checkpointer.save(LOSS, at_once=True)
    assert saving.saved() == {4: 4.0}


def test_training_goes_on_while_the_disk_is_slow(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    save, may_write = saving.disk.save, threading.Semaphore(0)

    def slowly(*arguments: Any) -> Path:
        assert may_write.acquire(timeout=20)
        return save(*arguments)

    monkeypatch.setattr(saving.disk, "save", slowly)
    saving.step_to(2)
    saving.checkpointer.save(LOSS)
    saving.step_to(4)  # the weights change before they are written
    saving.checkpointer.raise_failure()
    assert saving.saved() == {}
    threading.Timer(0.2, may_write.release).start()
    saving.checkpointer.save(LOSS)  # waits for the first
    assert saving.checkpointer.waited_s > 0.1
    assert saving.saved() == {2: 2.0}
    may_write.release()
    saving.checkpointer.__exit__()
    assert saving.saved() == {2: 2.0, 4: 4.0}


def test_a_copy_keeps_layout_and_kind() -> None:
    tensor = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    copied = copy_to_host({"a": [tensor, (1, "x")], "b": {"c": None}})
    assert torch.equal(copied["a"][0], tensor)
    assert copied["a"][0].stride() == tensor.stride()
    assert copied["a"][0].data_ptr() != tensor.data_ptr()
    assert not copied["a"][0].requires_grad
    assert copied["a"][1] == (1, "x")
    assert copied["b"] == {"c": None}


@pytest.mark.gpu
def test_copies_from_a_gpu_are_of_the_moment_they_were_asked_for() -> None:
    tensor = torch.zeros(2**24, device="cuda")
    copied = copy_to_host({"weight": tensor})
    tensor.fill_(1.0)
    torch.cuda.synchronize()
    assert copied["weight"].device.type == "cpu"
    assert not copied["weight"].any()

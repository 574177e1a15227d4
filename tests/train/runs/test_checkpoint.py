"""Checkpoints: whole, or not there; wrong content in an undamaged one ends in one line, and nothing in it is run.

They are saved when they are due, while training goes on, and never with weights that are not finite.
"""

import io
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peclr_dali import Index, UserError, World
from peclr_dali.models.weights import require_finite
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpoint import (
    FORMAT,
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
)
from peclr_dali.train.runs.checkpointer import Checkpointer, copy_to_host
from tests.command_line import as_options, refusal, run_cli
from tests.train import tiny_run


def state(value: float = 1.0, count: int = 5000) -> dict[str, Any]:
    return {
        "config": {"encoder": {"name": "resnet18"}, "geometry": {"side_px": 32}},
        "network": {"weight": torch.full((count,), value)},
        "scheduler": {"steps": [1, 2]},
    }


def test_what_is_saved_is_loaded_and_the_last_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    assert [path.name for path in checkpoints.paths()] == ["step_000000002.pt", "step_000000003.pt"]
    newest = checkpoints.latest_undamaged()
    assert newest == checkpoints.latest() == tmp_path / "new" / "step_000000003.pt"
    loaded = load_checkpoint(newest)
    assert loaded["step"] == 3
    assert torch.equal(loaded["network"]["weight"], torch.full((5000,), 3.0))
    assert loaded["scheduler"] == {"steps": [1, 2]}


@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_found_or_changes_nothing(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = Checkpoints(tmp_path_factory.mktemp("damaged"), keep=1).save(1, state(count=100))
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), "length")])
        with pytest.raises(DamagedCheckpoint, match="is damaged, or not a checkpoint"):
            load_checkpoint(path)
        return
    place = data.draw(st.integers(0, len(whole) - 1), "place")
    bit = 1 << data.draw(st.integers(0, 7), "bit")
    path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
    with suppress(DamagedCheckpoint):
        loaded = load_checkpoint(path)
        assert torch.equal(loaded.pop("network")["weight"], torch.ones(100))
        rest = {key: value for key, value in state().items() if key != "network"}
        assert loaded == {"format": FORMAT, "step": 1, **rest}


def test_any_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=1).save(1, state(value=2.5, count=20))
    whole = path.read_bytes()
    first = whole.index(torch.full((20,), 2.5).numpy().tobytes())
    table = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"data/0"))  # external attributes: bit 4 marks a folder
    for place, bit in [*((first + number, number % 8) for number in range(80)), (table + 38, 4)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(path)


def test_a_damaged_checkpoint_is_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    older, newer = checkpoints.save(1, state()), checkpoints.save(2, state())
    newer.write_bytes(newer.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest_undamaged() == older
    assert caplog.messages == [f"{newer} is incomplete or damaged: using step_000000001.pt instead"]
    assert checkpoints.paths() == [older]  # the damaged one does not count among those that are kept
    older.write_bytes(b"")
    with pytest.raises(UserError, match=r"no usable checkpoint: .*step_000000001.pt and all others are damaged"):
        checkpoints.latest_undamaged()


def test_files_left_by_a_crash_are_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step_000000001.part").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest_undamaged() is None
    checkpoints.save(2, state())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.pt"]


STEP = "checkpoints/step_000000004.pt"


class Evil:
    """Reading it would run something."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was_run",)


def saved_by_torch(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


WHOLE: dict[str, Any] = {
    "format": FORMAT, "step": 1, "config": {"encoder": {"name": "resnet18"}, "geometry": {"side_px": 32}},
    "network": {"w": torch.zeros(1)},
}  # fmt: skip
WRONG = {
    "not an archive": b"garbage",
    "code": saved_by_torch(Evil()),
    "code inside": saved_by_torch({**WHOLE, "best": Evil()}),
    "list": saved_by_torch([1, 2]),
    "no step": saved_by_torch({key: value for key, value in WHOLE.items() if key != "step"}),
    "configuration without encoder": saved_by_torch({**WHOLE, "config": {"encoder": 3}}),
    "configuration as text": saved_by_torch({**WHOLE, "config": "encoder geometry"}),
    "encoder as text": saved_by_torch({**WHOLE, "config": {**WHOLE["config"], "encoder": "resnet18"}}),
    "side as text": saved_by_torch({**WHOLE, "config": {**WHOLE["config"], "geometry": {"side_px": "32"}}}),
    "network as a tensor": saved_by_torch({**WHOLE, "network": torch.zeros(1)}),
    "network of numbers": saved_by_torch({**WHOLE, "network": {"w": 1.0}}),
    "tensors by number": saved_by_torch({**WHOLE, "network": {1: torch.zeros(1)}}),
}


def test_weights_that_are_not_finite_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "nan.pt").write_bytes(saved_by_torch({**WHOLE, "network": {"w": torch.tensor([torch.nan])}}))
    with pytest.raises(UserError, match=r"nan.pt: w holds NaN or infinity; expected finite weights"):
        load_checkpoint(tmp_path / "nan.pt")
    quantized = torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
    with pytest.raises(UserError, match=r"a.pth: w holds no plain numbers"):
        require_finite({"w": quantized}, "a.pth")
    with pytest.raises(UserError, match=r"bn1.running_var is negative somewhere; expected variances"):
        require_finite({"bn1.running_mean": torch.tensor([-1]), "bn1.running_var": torch.tensor([1.0, -1])}, "a.pth")


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_content_is_reported_in_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step_000000001.pt"
    path.write_bytes(WRONG[kind])
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert re.match(f"{path} is (damaged, or )?not a checkpoint of this project: ", str(caught.value))
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "was_run").exists()


def replace(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in keys[:-1]:
            saved = saved[key]
        assert keys[-1] in saved or isinstance(keys[-1], int)
        saved[keys[-1]] = value

    return change


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no optimiser": (lambda saved: saved.pop("optimizer"), "KeyError: 'optimizer'"),
    "other images": (replace([7], "images"), "is of a run on [7] images, and there are [50] now"),
    "tensor of another size": (replace(torch.zeros(7), "network", "projector.0.weight"), "projector.0.weight"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    tiny_run.write_images(root / "images")
    assert run_cli(*pretrain(root / "images", root / "run")) == 0
    return root


def pretrain(images: Path, out: Path) -> list[str]:
    settings = tiny_run.settings(images, out, "train.epochs=1", "run.checkpoint_every=4", "run.keep=1")
    return ["pretrain", "--resume", "auto", *as_options(settings)]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", SPOILT)
def test_a_run_is_not_resumed_from_wrong_content(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = SPOILT[kind]
    shutil.copytree(run / "run", tmp_path / "run")
    saved = torch.load(tmp_path / "run" / STEP, weights_only=True)
    spoil(saved)
    torch.save(saved, tmp_path / "run" / STEP)
    error = refusal(capsys, *pretrain(run / "images", tmp_path / "run"))
    assert error.startswith(f"error: {tmp_path / 'run' / STEP} ")
    assert words in error


LOSS = torch.ones(())


class Saving:
    """A run whose checkpoints are saved after every second step."""

    def __init__(self, root: Path) -> None:
        run, self.state = tiny_run.plain_run(root, World(), "run.checkpoint_every=2")
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

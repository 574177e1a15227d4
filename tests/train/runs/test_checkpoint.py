"""Checkpoints: whole, or not there; written while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.errors import UserError
from peclr_dali.train.runs.checkpoint import (
    FORMAT,
    BackgroundWriter,
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
    snapshot,
)
from tests.full_disk import files_of_at_most


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


def test_on_a_full_disk_only_the_older_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with BackgroundWriter(checkpoints) as writer:
        with files_of_at_most(2000):
            writer.save(2, state())
            with pytest.raises(OSError, match=r"step_") as refused:
                writer.finish()
            assert refused.value.__notes__ == [f"{tmp_path / 'step_000000002.pt'} was not written"]
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        writer.save(3, state())  # told once; there may be room again
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000003.pt"]


def test_files_left_by_a_crash_are_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step_000000001.part").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest_undamaged() is None
    checkpoints.save(2, state())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.pt"]


class SlowDisk(Checkpoints):
    """Writes when told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=10)
        self.may_write = threading.Semaphore(0)
        self.writing = 0
        self.most_at_once = 0

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        assert self.may_write.acquire(timeout=20)
        self.writing -= 1
        return super().save(step, state)


def test_training_goes_on_while_the_disk_is_slow(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    weights = state(1.0)
    with BackgroundWriter(disk) as writer:
        writer.save(1, weights)
        weights["network"]["weight"].fill_(2.0)  # the next step
        writer.check()
        assert disk.paths() == []
        threading.Timer(0.2, disk.may_write.release).start()
        writer.save(2, weights)  # waits for the first
        assert writer.waited_s > 0.1
        weights["network"]["weight"].fill_(3.0)
        assert len(disk.paths()) == 1
        disk.may_write.release()
    assert disk.most_at_once == 1
    values = [load_checkpoint(path)["network"]["weight"][0].item() for path in disk.paths()]
    assert values == [1.0, 2.0]


def test_a_run_goes_on_without_its_curves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with BackgroundWriter(Checkpoints(tmp_path, keep=1), fail) as writer:
        for step in (1, 2):
            writer.save(step, state())
            writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.pt"]
    assert caplog.messages[0] == "the curves cannot be drawn after step 1: ZeroDivisionError"


def test_a_copy_keeps_layout_and_kind() -> None:
    tensor = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    copied, wait = snapshot({"a": [tensor, (1, "x")], "b": {"c": None}})
    wait()
    assert torch.equal(copied["a"][0], tensor)
    assert copied["a"][0].stride() == tensor.stride()
    assert copied["a"][0].data_ptr() != tensor.data_ptr()
    assert not copied["a"][0].requires_grad
    assert copied["a"][1] == (1, "x")
    assert copied["b"] == {"c": None}


@pytest.mark.gpu
def test_copies_from_a_gpu_are_of_the_moment_they_were_asked_for() -> None:
    tensor = torch.zeros(2**24, device="cuda")
    copied, wait = snapshot({"weight": tensor})
    tensor.fill_(1.0)
    wait()
    assert copied["weight"].device.type == "cpu"
    assert not copied["weight"].any()

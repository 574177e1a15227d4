"""Checkpoints: whole, or not there; written while training goes on."""

import logging
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
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
)


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

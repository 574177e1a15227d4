"""Checkpoints: whole, or not there; wrong content in an undamaged one ends in one line, and nothing in it is run."""

import io
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peclr_dali.errors import UserError
from peclr_dali.models.weights import require_finite
from peclr_dali.train.runs.checkpoint import (
    FORMAT,
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
)
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

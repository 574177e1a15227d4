"""A checkpoint that is undamaged and has wrong content ends in one line, and nothing in it is run."""

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.weights import require_finite
from peclr_dali.train.runs.checkpoint import FORMAT, load_checkpoint
from tests.command_line import as_options, run_cli
from tests.train import tiny_run

pytestmark = pytest.mark.usefixtures("narrow")

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


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved.pop(key)


def replace(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in keys[:-1]:
            saved = saved[key]
        assert keys[-1] in saved or isinstance(keys[-1], int)
        saved[keys[-1]] = value

    return change


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no optimiser": (drop("optimizer"), "KeyError: 'optimizer'"),
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


@pytest.mark.parametrize("kind", SPOILT)
def test_a_run_is_not_resumed_from_wrong_content(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = SPOILT[kind]
    shutil.copytree(run / "run", tmp_path / "run")
    saved = torch.load(tmp_path / "run" / STEP, weights_only=True)
    spoil(saved)
    torch.save(saved, tmp_path / "run" / STEP)
    capsys.readouterr()
    assert run_cli(*pretrain(run / "images", tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'run' / STEP} ")
    assert error.count("\n") == 1
    assert words in error

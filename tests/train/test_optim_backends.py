"""A checkpoint of torch's Adam goes on under apex's FusedAdam, and back.

`tests.train.fused_adam` stands in for apex.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config, OptimConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.checkpoint import load_checkpoint
from peclr_dali.train.steps.optim import Lars, build_optimizer
from tests.train.fused_adam import install_apex
from tests.train.tiny_run import settings, write_images


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """An apex that can be imported."""
    install_apex(monkeypatch)


def network() -> nn.Module:
    """Of both groups: what decays and what does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def optimizer_of(model: nn.Module, backend: str) -> Lars:
    config = OptimConfig(backend=backend, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]
    lars = build_optimizer(config, model.named_parameters(), 4)
    torch.optim.lr_scheduler.LambdaLR(lars, lambda _: 1.0)  # which adds a key to the groups
    return lars


def take_steps(lars: Lars, model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        lars.step()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize("backends", [("torch", "apex"), ("apex", "torch")])
def test_a_state_continues_with_the_other_backend(backends: tuple[str, str]) -> None:
    uninterrupted = network()
    take_steps(optimizer_of(uninterrupted, "torch"), uninterrupted, range(6))

    model = network()
    before = optimizer_of(model, backends[0])
    take_steps(before, model, range(3))
    saved = copy.deepcopy(before.state_dict())
    after = optimizer_of(model, backends[1])
    after.load_state_dict(saved)
    take_steps(after, model, range(3, 6))

    torch.testing.assert_close(weights_of(model), weights_of(uninterrupted), atol=1e-13, rtol=1e-12)
    fresh = optimizer_of(network(), backends[1])
    assert [set(group) - {"step"} for group in after.param_groups] == [set(group) for group in fresh.param_groups]
    assert [group["weight_decay"] for group in after.param_groups] == [0.1, 0.0]
    assert after.param_groups is after.inner.param_groups


@pytest.mark.usefixtures("apex")
def test_there_and_back_is_the_same_state() -> None:
    model = network()
    ours = optimizer_of(model, "torch")
    take_steps(ours, model, range(3))
    there, back = optimizer_of(model, "apex"), optimizer_of(model, "torch")
    there.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert [group["step"] for group in there.param_groups] == [3, 3]
    assert all(entries.keys() == {"exp_avg", "exp_avg_sq"} for entries in there.state.values())
    back.load_state_dict(copy.deepcopy(there.state_dict()))
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize("backends", [("torch", "apex"), ("apex", "torch")])
def test_a_state_before_the_first_step(backends: tuple[str, str]) -> None:
    model = network()
    after = optimizer_of(model, backends[1])
    after.load_state_dict(optimizer_of(model, backends[0]).state_dict())
    take_steps(after, model, range(1))
    other = network()
    take_steps(optimizer_of(other, backends[1]), other, range(1))
    assert torch.equal(weights_of(model), weights_of(other))


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize(
    ("backend", "group", "entry", "message"),
    [
        ("apex", {"amsgrad": True}, {}, "amsgrad = True"),
        ("apex", {"maximize": True}, {}, "maximize = True"),
        ("apex", {}, {"step": torch.tensor(7.0)}, r"different steps: \[2, 7\]"),
        ("torch", {"bias_correction": False}, {}, "bias_correction = False"),
    ],
)
def test_what_the_other_backend_cannot_do_is_refused(
    backend: str, group: dict[str, Any], entry: dict[str, Any], message: str
) -> None:
    model = network()
    before = optimizer_of(model, "torch" if backend == "apex" else "apex")
    take_steps(before, model, range(2))
    saved = copy.deepcopy(before.state_dict())
    saved["param_groups"][0].update(group)
    saved["state"][0].update(entry)
    with pytest.raises(UserError, match=message):
        optimizer_of(model, backend).load_state_dict(saved)


@pytest.mark.usefixtures("narrow")
def test_a_run_whose_ranks_differ_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", 14)

    def gather(self: World, mine: object) -> list[object]:
        is_optimizer = isinstance(mine, tuple) and "LARS" in mine[0]
        return [mine, ("LARS around apex's FusedAdam", "b")] if is_optimizer else [mine]

    monkeypatch.setattr(World, "gather_objects", gather)
    message = (
        r"rank 0 on \S+ has LARS around torch's Adam, fused, rank 1 on b has LARS around apex's FusedAdam\..*backend"
    )
    with pytest.raises(UserError, match=message):
        pretrain(load_config(Config, [], settings(tmp_path / "images", tmp_path / "run")))
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.usefixtures("apex", "narrow")
def test_a_run_continues_with_the_other_backend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint says which backend made it, and the log says that it is another one now."""
    write_images(tmp_path / "images", 14)
    caplog.set_level(logging.INFO)
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"

    def run(backend: str) -> None:
        overrides = ("train.epochs=6", "train.precision=fp64", f"optim.backend={backend}")
        pretrain(load_config(Config, [], settings(tmp_path / "images", out, *overrides)), "auto")

    run("torch")
    assert load_checkpoint(checkpoints / "step_000000006.pt")["backend"] == "LARS around torch's Adam, fused"
    whole = load_checkpoint(checkpoints / "step_000000006.pt")["network"]
    for backend, other in (("apex", "LARS around apex's FusedAdam"), ("torch", "LARS around torch's Adam, fused")):
        (checkpoints / "step_000000006.pt").unlink()
        caplog.clear()
        run(backend)
        saved = load_checkpoint(checkpoints / "step_000000006.pt")
        assert saved["backend"] == other
        for name, value in whole.items():
            torch.testing.assert_close(saved["network"][name], value, atol=1e-9, rtol=1e-9)
        logged = "\n".join(record.getMessage() for record in caplog.records)
        assert "resuming after step 3" in logged
        switched = "with LARS around torch's Adam, fused; from here on the optimiser is LARS around apex" in logged
        assert switched == (backend == "apex")

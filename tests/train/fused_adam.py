"""A stand-in for NVIDIA apex's FusedAdam, which needs a CUDA toolkit to be built.

Options, state and formula as in apex/optimizers/fused_adam.py and csrc/multi_tensor_adam.cu: one count of steps for
each group and none for a tensor, moments in `exp_avg` and `exp_avg_sq`, decoupled weight decay. It differs in that it
computes on any device, in the parameters' own type.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch


class FusedAdam(torch.optim.Optimizer):
    """Defaults as apex's."""

    __module__ = "apex.optimizers.fused_adam"

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        defaults = {
            "lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            correct = [1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in group["betas"]]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                first, second = state["exp_avg"], state["exp_avg_sq"]
                beta_1, beta_2 = group["betas"]
                first.mul_(beta_1).add_(weight.grad, alpha=1 - beta_1)
                second.mul_(beta_2).add_(weight.grad.square(), alpha=1 - beta_2)
                update = (first / correct[0]) / ((second / correct[1]).sqrt() + group["eps"])
                weight -= group["lr"] * (update + group["weight_decay"] * weight)


def install_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an apex importable whose `FusedAdam` is the one here."""
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)

"""LARS around Adam, its parameter groups, and the learning rate over a run."""

from __future__ import annotations

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from errors import UserError
from train.config.pretraining import OptimConfig


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017) around another optimiser, as in apex's former LARC.

    For each tensor w with gradient g, learning rate lr and weight decay wd of its group:

        trust  = c |w| / (|g| + wd |w| + eps)
        factor = min(trust / lr, 1) if clip else trust
        g      = factor (g + wd w)

    and the inner optimiser steps with this gradient and no weight decay of its own. A tensor with |w| = 0 or |g| = 0
    keeps its gradient as it is. One pass of foreach kernels; nothing waits for the GPU.

    Parameter groups and state are the inner optimiser's own, so schedulers, GradScaler and checkpoints see one
    optimiser, and state dicts are interchangeable with the inner one's. Gradients are changed in place; under
    GradScaler they are unscaled before, by `unscale_` or by the scaler's own `step`, which changes nothing on overflow.

    Args:
        inner: the optimiser that makes the step.
        trust_coefficient: c.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.trust_coefficient, self.clip, self.eps = inner, trust_coefficient, clip, eps
        self._share_with_inner()

    def _share_with_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, here or of the inner optimiser."""
        self.inner.load_state_dict(state_dict)
        self._share_with_inner()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Scales the gradients and lets the inner optimiser step."""
        for group in self.param_groups:
            self._scale_gradients(group)
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            self.inner.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale_gradients(self, group: dict[str, Any]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for weight in group["params"]:
            if weight.grad is not None:
                weights, gradients = alike[weight.device, weight.dtype]
                weights.append(weight)
                gradients.append(weight.grad)
        for weights, gradients in alike.values():
            weight_norm = torch.stack(torch._foreach_norm(weights))  # (tensors,)
            gradient_norm = torch.stack(torch._foreach_norm(gradients))
            factor = self.trust_coefficient * weight_norm / (gradient_norm + decay * weight_norm + self.eps)
            if self.clip:
                factor = (factor / lr).clamp(max=1)
            scaled = (weight_norm > 0) & (gradient_norm > 0)
            if decay:
                torch._foreach_add_(gradients, torch._foreach_mul(weights, (scaled.to(factor) * decay).unbind()))
            torch._foreach_mul_(gradients, factor.where(scaled, 1).unbind())

    def describe(self) -> str:
        """One line for the log: which inner optimiser works, and how."""
        kind = type(self.inner)
        fused = ", fused" if self.inner.defaults.get("fused") else ""
        return f"LARS around {kind.__module__.split('.')[0]}'s {kind.__name__}{fused}"


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, Parameter]],
    batch: int,
    undecayed: Collection[str] = (),
) -> Lars:
    """Adam in LARS, with one parameter group that decays and one that does not.

    Args:
        config: all settings; the learning rate is set without warm-up, which is `learning_rate_factor`'s.
        named_parameters: of the network, on their device already; those that need no gradient are left out.
        batch: images per optimiser step, over all ranks and micro-batches.
        undecayed: further parameters that do not decay.

    Raises:
        UserError: apex is asked for and cannot be used.
    """
    decayed: list[Parameter] = []
    exempt: list[Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (exempt if name in undecayed or _is_exempt(config, name, parameter) else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (exempt, 0.0))
        if parameters
    ]
    lr = config.lr if config.lr is not None else config.lr_per_sqrt_image * math.sqrt(batch)
    on_gpu = all(parameter.is_cuda for parameter in decayed + exempt)
    return Lars(_build_adam(config.backend, groups, lr, on_gpu), config.trust_coefficient, config.clip, config.eps)


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine to zero; the factor that LambdaLR wants.

    Args:
        step: optimiser steps made so far.
        total_steps: of the whole run; from there on the factor is 0.
        warmup_steps: at this step the factor is 1. The ramp starts above zero, so that no step is without effect.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))


def _is_exempt(config: OptimConfig, name: str, parameter: Parameter) -> bool:
    if config.decay_exempt == "upstream":  # in their encoder, a Sequential, only norms in residual blocks are "bn"
        return re.search(r"bias|layer\d\.\d+\.bn", name) is not None
    return parameter.ndim < 2  # in our networks these are the biases and the norms' scales and shifts, and all of them


def _build_adam(
    backend: Literal["auto", "torch", "apex"], groups: list[dict[str, Any]], lr: float, on_gpu: bool
) -> torch.optim.Optimizer:
    if backend == "apex" or (backend == "auto" and on_gpu):
        try:
            return cast(torch.optim.Optimizer, importlib.import_module("apex.optimizers").FusedAdam(groups, lr=lr))
        except (ImportError, AttributeError, RuntimeError) as error:  # absent, PyPI's namesake, or without its kernels
            if backend == "apex":
                raise UserError(
                    f'optim.backend = "apex", but NVIDIA apex\'s FusedAdam cannot be used here ({error}): '
                    "it is not on PyPI; clone https://github.com/NVIDIA/apex and run 'APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
                    'pip install --no-build-isolation .\' in it with a CUDA toolkit, or set optim.backend = "torch".'
                ) from error
    return torch.optim.Adam(groups, lr=lr, fused=True)

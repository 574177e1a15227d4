"""LARS around Adam, its parameter groups, and the learning rate over a run."""

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from peclr_dali.errors import UserError
from peclr_dali.train.config.pretraining import OptimConfig


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017) around any optimiser, as apex's former LARC.

    For each tensor w with gradient g, learning rate lr and weight decay wd of its group:

        trust  = c |w| / (|g| + wd |w| + eps)
        factor = min(trust / lr, 1) if clip else trust
        g      = factor (g + wd w)

    and the inner optimiser steps with this gradient and no weight decay of its own, not even AdamW's. A tensor with
    |w| = 0 or |g| = 0 keeps its gradient. A group takes three foreach calls (norms, decay, factor), which copy no
    tensor and do not wait for the GPU; on a GPU, the third takes a kernel for each tensor. docs/fidelity.md compares
    this with apex and lightly.

    Parameter groups and state are the inner optimiser's own, so schedulers, GradScaler and checkpoints see one
    optimiser, and state dicts are interchangeable with the inner one's. Gradients are changed in place, after
    GradScaler has unscaled them.

    Args:
        inner: the optimiser that makes the step, such as torch.optim.SGD. Groups without a weight decay have none.
        trust_coefficient: c.
        least_dims: tensors with fewer dimensions are not scaled, and the inner optimiser steps with g + wd w; 2 leaves
            out biases and norms.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
        *,
        least_dims: int = 0,
    ) -> None:
        if any(group.get("maximize") for group in inner.param_groups):
            raise ValueError("the inner optimiser maximises; expected one that minimises: negate the loss")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.trust_coefficient, self.clip, self.eps = inner, trust_coefficient, clip, eps
        self.least_dims = least_dims
        del self.param_groups, self.state  # see `__getattr__`

    def __getattr__(self, name: str) -> Any:
        """The groups and the state are the inner optimiser's, which loading replaces."""
        if name in ("param_groups", "state") and "inner" in vars(self):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimiser or of the inner one."""
        self.inner.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Scale the gradients, of a closure if given, and step by the inner optimiser. Returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._scale_gradients(group)
        decaying = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        try:
            for group, _ in decaying:
                group["weight_decay"] = 0.0
            self.inner.step()
        finally:
            for group, decay in decaying:
                group["weight_decay"] = decay
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but the `step` that a scheduler sets, which is bound to this very object."""
        return {name: value for name, value in vars(self).items() if name != "step"}

    def _scale_gradients(self, group: dict[str, Any]) -> None:
        lr, decay = group["lr"], group.get("weight_decay", 0.0)
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if weight.ndim < self.least_dims:
                if decay:
                    weight.grad.add_(weight, alpha=decay)
            else:
                weights, gradients = alike[weight.device, weight.dtype]
                weights.append(weight)
                gradients.append(weight.grad)
        for weights, gradients in alike.values():
            weight_norm, gradient_norm = torch.stack(torch._foreach_norm(weights + gradients)).chunk(2)  # (tensors,)
            factor = self.trust_coefficient * weight_norm / (gradient_norm + decay * weight_norm + self.eps)
            if self.clip:
                factor = (factor / lr).clamp(max=1)
            # A zero gradient stays zero: the factor 0 removes the decay. Zero weights have no decay.
            factor = factor.where(weight_norm > 0, 1).masked_fill(gradient_norm == 0, 0)
            if decay:
                torch._foreach_add_(gradients, weights, alpha=decay)
            torch._foreach_mul_(gradients, factor.unbind())


def build_optimizer(
    config: OptimConfig,
    named_parameters: Iterable[tuple[str, Parameter]],
    batch: int,
    undecayed: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Adam in LARS, or AdamW alone, with one parameter group that decays and one that does not.

    Args:
        config: all settings. The learning rate is set without warm-up, which `learning_rate_factor` applies.
        named_parameters: the network's, already on their device. Those without gradient are left out.
        batch: images per optimiser step, over all ranks and micro-batches.
        undecayed: further parameters that do not decay.

    Raises:
        UserError: apex is asked for and is not installed.
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
    kind = torch.optim.AdamW if config.lars == "none" else torch.optim.Adam
    adam = _apex_adam(groups, lr) if config.backend == "apex" else kind(groups, lr=lr, fused=True)
    if config.lars == "none":  # apex's is AdamW already
        return adam
    return Lars(
        adam, config.trust_coefficient, config.clip, config.eps, least_dims=2 if config.lars == "weights" else 0
    )


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine to zero; the factor that LambdaLR wants.

    Args:
        step: optimiser steps made so far.
        total_steps: number of steps of the whole run. From this step on, the factor is 0.
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


def _apex_adam(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    try:
        fused_adam = importlib.import_module("apex.optimizers").FusedAdam
    except ImportError as error:
        raise UserError(
            f'optim.backend = "apex", but {error}: build NVIDIA apex from https://github.com/NVIDIA/apex (the package '
            'of this name on PyPI is another one), or set optim.backend = "torch"'
        ) from error
    return cast(torch.optim.Optimizer, fused_adam(groups, lr=lr))

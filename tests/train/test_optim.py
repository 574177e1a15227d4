"""The optimiser of a configuration, and the learning rate over a run."""

import itertools
import sys
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, ProjectorConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.models.network import build_projector
from peclr_dali.train.config.pretraining import OptimConfig
from peclr_dali.train.steps.optim import Lars, build_optimizer, learning_rate_factor


def network() -> nn.Module:
    encoder = build_encoder(EncoderConfig("resnet18", "random"))
    return nn.Sequential(encoder, build_projector(ProjectorConfig(), encoder.feature_dim))


def decaying(config: OptimConfig, model: nn.Module) -> set[str]:
    lars = build_optimizer(config, model.named_parameters(), batch=4)
    ids = {id(p) for group in lars.param_groups if group["weight_decay"] for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_biases_and_norms_have_no_weight_decay() -> None:
    model = network()
    norms_and_biases = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or name == "bias"
    }
    everything = {name for name, _ in model.named_parameters()}
    assert decaying(OptimConfig(), model) == everything - norms_and_biases
    upstream = decaying(OptimConfig(decay_exempt="upstream"), model)
    assert upstream - decaying(OptimConfig(), model) == {
        "0.resnet.bn1.weight",
        *(f"0.resnet.layer{i}.0.downsample.1.weight" for i in (2, 3, 4)),
        "1.1.weight",
    }
    assert not any("bias" in name or ".0.bn" in name for name in upstream)


def test_learning_rate_follows_the_square_root_of_the_batch() -> None:
    model = nn.Linear(2, 2)
    for config, lr in ((OptimConfig(), pytest.approx(4.5e-3, rel=0.01)), (OptimConfig(lr=0.1), 0.1)):
        groups = build_optimizer(config, model.named_parameters(), 2048).param_groups
        assert [group["lr"] for group in groups] == [lr, lr]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    config = OptimConfig(weight_decay=0.5, trust_coefficient=0.1, clip=False, eps=0.1)
    lars = cast(Lars, build_optimizer(config, [*model.named_parameters()], 1))
    assert [group["params"] for group in lars.param_groups] == [[model.weight]]
    assert (lars.param_groups[0]["weight_decay"], lars.trust_coefficient, lars.clip, lars.eps) == (0.5, 0.1, False, 0.1)
    kinds = [build_optimizer(OptimConfig(lars=on), model.named_parameters(), 1) for on in ("all", "weights", "none")]
    assert [getattr(kind, "least_dims", type(kind)) for kind in kinds] == [0, 2, torch.optim.AdamW]


def test_the_inner_adam_is_apexs_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config, parameters = OptimConfig(backend="apex"), [*nn.Linear(2, 2).named_parameters()]
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    with pytest.raises(UserError, match=r'"apex".*github.com/NVIDIA/apex.*"torch"'):
        build_optimizer(config, parameters, 1)
    stand_in = SimpleNamespace(FusedAdam=type("FusedAdam", (torch.optim.Adam,), {}))
    monkeypatch.setitem(sys.modules, "apex.optimizers", stand_in)
    inner = [cast(Lars, build_optimizer(one, parameters, 1)).inner for one in (config, OptimConfig())]
    assert [type(adam) for adam in inner] == [stand_in.FusedAdam, torch.optim.Adam]


def test_learning_rate_factor_at_its_ends() -> None:
    factors = [learning_rate_factor(step, 100, 10) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == learning_rate_factor(1000, 100, 10) == 0
    assert 0 < factors[99] < 1e-3
    rises = [b - a for a, b in itertools.pairwise(factors[:11])]
    assert rises == pytest.approx([1 / 11] * 10)
    assert all(b < a for a, b in itertools.pairwise(factors[10:]))
    assert learning_rate_factor(0, 5, 0) == 1
    assert learning_rate_factor(4, 5, 9) == 0.5  # a run shorter than its warm-up stays on the ramp

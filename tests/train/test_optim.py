"""What a configuration makes of a network in training: its optimiser, learning rate and number formats."""

import dataclasses
import itertools
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from peclr_dali import GeometryConfig, UserError
from peclr_dali.models.config import EncoderConfig, ProjectorConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.models.network import build_projector
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config, OptimConfig, TrainConfig
from peclr_dali.train.pose.inference import inference
from peclr_dali.train.steps.optim import Lars, build_optimizer, learning_rate_factor
from peclr_dali.train.steps.train_state import resolve_precision
from tests.train.tiny_run import TINY
from tests.train.tiny_step import Operators, Pretraining, assert_same, gradients, images


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
    assert decaying(OptimConfig(), model) == {name for name, _ in model.named_parameters()} - norms_and_biases
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
    assert [b - a for a, b in itertools.pairwise(factors[:11])] == pytest.approx([1 / 11] * 10)
    assert all(b < a for a, b in itertools.pairwise(factors[10:]))
    assert learning_rate_factor(0, 5, 0) == 1
    assert learning_rate_factor(4, 5, 9) == 0.5  # a run shorter than its warm-up stays on the ramp


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "side_px", "expected"),
    [(True, False, 32, "bf16"), (False, True, 128, "bf16"), (False, False, 128, "fp32"), (True, True, 31, "fp32")],
)
def test_auto_is_bf16_where_a_cpu_is_fast_and_right(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, side_px: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    config = Config(geometry=GeometryConfig(side_px=side_px))
    assert resolve_precision(config, CPU) == expected
    assert resolve_precision(dataclasses.replace(config, train=TrainConfig(precision="fp16")), CPU) == "fp16"


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_weights_are_cast_once_in_a_step(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in each of three micro-batches. The gradients are as if they had been, in every bit."""
    overrides = (*TINY, "train.precision=bf16", f"train.recompute={recompute}")
    batch = images(12)
    for view in batch.views:
        view.image = view.image.repeat_interleave(4, 2).repeat_interleave(4, 3)  # 32 pixels, see `resolve_precision`
    once, each_time = (Pretraining(load_config(Config, [], overrides)) for _ in range(2))
    kernels = [module.weight for module in once.network.modules() if isinstance(module, nn.Conv2d)]
    with Operators() as ran:
        once.step(batch)
    monkeypatch.setattr("peclr_dali.train.steps.exact.casts_once", lambda device: nullcontext())
    each_time.step(batch)
    of_weights, of_gradients = len(kernels) + 3, 3  # two linear layers and a bias too; those of the projections
    assert ran.counts["_to_copy", torch.float32] == of_weights + of_gradients
    assert_same(gradients(once.network), gradients(each_time.network), relative=0)


def test_trained_networks_run_without_tf32() -> None:
    """Torch computes float32's convolutions in TF32 on GPUs; the setting is that of the process afterwards."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.conv.fp32_precision
    with inference(CPU):
        assert not cudnn.allow_tf32
        assert cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert (cudnn.allow_tf32, cudnn.conv.fp32_precision) == before == (True, "tf32")

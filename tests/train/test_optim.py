import copy
import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from errors import UserError
from models.config import EncoderConfig, ProjectorConfig
from models.encoders import build_encoder
from models.network import build_projector
from tests.train.plain_loops import step_together, tensors
from train.config.pretraining import OptimConfig
from train.steps.optim import Lars, build_optimizer, describe, learning_rate_factor


def with_gradients(weights: list[Tensor], gradients: list[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


class PlainLarsAdam:
    """The formulas written as loops over numbers."""

    def __init__(self, weights: list[Tensor], lr: float, decay: float, trust: float, clip: bool, eps: float) -> None:
        self.weights = [weight.flatten().tolist() for weight in weights]
        self.first = [[0.0] * len(w) for w in self.weights]
        self.second = [[0.0] * len(w) for w in self.weights]
        self.lr, self.decay, self.trust, self.clip, self.eps = lr, decay, trust, clip, eps
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        for k, gradient in enumerate(gradients):
            w, g = self.weights[k], gradient.flatten().tolist()
            w_norm, g_norm = math.sqrt(sum(x * x for x in w)), math.sqrt(sum(x * x for x in g))
            if w_norm != 0 and g_norm != 0:
                trust = self.trust * w_norm / (g_norm + self.decay * w_norm + self.eps)
                factor = min(trust / self.lr, 1) if self.clip else trust
                g = [factor * (gi + self.decay * wi) for gi, wi in zip(g, w, strict=True)]
            for i, gi in enumerate(g):
                self.first[k][i] = 0.9 * self.first[k][i] + 0.1 * gi
                self.second[k][i] = 0.999 * self.second[k][i] + 0.001 * gi * gi
                first = self.first[k][i] / (1 - 0.9**self.steps)
                second = self.second[k][i] / (1 - 0.999**self.steps)
                w[i] -= self.lr * first / (math.sqrt(second) + 1e-8)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("zero", ["none", "weight", "gradient"])
@pytest.mark.parametrize("lr", [0.003, 0.3])  # trust / lr on both sides of 1
def test_equals_plain_loops(fused: bool, clip: bool, decay: float, zero: str, lr: float) -> None:
    weights = tensors(0)
    if zero == "weight":
        weights[1].zero_()
    parameters = with_gradients(weights, tensors(1))
    inner = torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused)
    lars = Lars(inner, trust_coefficient=0.02, clip=clip, eps=1e-8)
    oracle = PlainLarsAdam(weights, lr, decay, 0.02, clip, 1e-8)
    step_together(lars, oracle, parameters, (3.0, 0.1, 3.0), zero)
    for parameter, expected in zip(parameters, oracle.weights, strict=True):
        torch.testing.assert_close(
            parameter.detach().flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
        )
    assert lars.param_groups[0]["weight_decay"] == decay


def test_groups_have_their_own_decay_and_rate_and_missing_gradients_are_skipped() -> None:
    first, second, third = with_gradients(tensors(0)[:3], tensors(1)[:3])
    third.grad = None
    before = third.detach().clone()
    groups = [{"params": [first], "weight_decay": 0.5, "lr": 0.1}, {"params": [second, third], "weight_decay": 0.0}]
    Lars(torch.optim.Adam(groups, lr=0.01)).step()
    for parameter, decay, lr in ((first, 0.5, 0.1), (second, 0.0, 0.01)):
        index = 0 if parameter is first else 1
        weight, gradient = tensors(0)[index], tensors(1)[index]
        trust = 0.02 * weight.norm() / (gradient.norm() + decay * weight.norm() + 1e-8)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, min(trust / lr, torch.tensor(1.0)) * (gradient + decay * weight))
    assert torch.equal(third, before)


def scale_in_separate_passes(weights: list[Tensor], gradients: list[Tensor], lr: float, decay: float) -> None:
    """A norm of each list, the decay from a copy of the weights, and the factor, each masked by the norms."""
    weight_norm = torch.stack(torch._foreach_norm(weights))
    gradient_norm = torch.stack(torch._foreach_norm(gradients))
    factor = (0.02 * weight_norm / (gradient_norm + decay * weight_norm + 1e-8) / lr).clamp(max=1)
    scaled = (weight_norm > 0) & (gradient_norm > 0)
    torch._foreach_add_(gradients, torch._foreach_mul(weights, (scaled.to(factor) * decay).unbind()))
    torch._foreach_mul_(gradients, factor.where(scaled, 1).unbind())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.3])
def test_gradients_are_those_of_separate_passes(decay: float, dtype: torch.dtype, bound: float) -> None:
    """Also of channels-last and 1 x 1 kernels, and where weights, gradients or both are zero."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4, 3, 3), (8, 4, 1, 1), (16, 8), (8,), (8,), (8,), (1,)]
    weights, gradients = (
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes] for _ in range(2)
    )
    weights[0], weights[1] = (tensor.contiguous(memory_format=torch.channels_last) for tensor in weights[:2])
    weights[4].zero_()
    gradients[5].zero_()
    weights[6].zero_()
    gradients[6].zero_()
    parameters = with_gradients(weights, gradients)
    Lars(torch.optim.SGD(parameters, lr=0.02, weight_decay=decay)).step()  # some factors below 1, some clamped
    scale_in_separate_passes(weights, gradients, 0.02, decay)
    for parameter, expected in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, atol=bound, rtol=bound)


class Calls(TorchDispatchMode):
    """Names of the operators that are called, and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.names.append(operator._schema.name.removeprefix("aten::"))
        made = [tensor for tensor in (result if isinstance(result, list) else [result]) if isinstance(tensor, Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in made)])
        return result


def test_a_group_is_scaled_by_three_calls_on_its_tensors() -> None:
    """One for all norms, one for the decay, which an exempt group does not need, and one for the factor."""
    decayed, exempt = [nn.Parameter(torch.ones(100, 100)) for _ in range(5)], [nn.Parameter(torch.ones(100))]
    for parameter in decayed + exempt:
        parameter.grad = torch.ones_like(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt}]
    inner = torch.optim.Adam(groups, fused=True)
    lars = Lars(inner)
    lars.step()  # makes the state
    with Calls() as calls:
        lars.step()
    assert [name for name in calls.names if name.startswith(("_foreach", "_fused"))] == [
        "_foreach_norm", "_foreach_add_", "_foreach_mul_", "_foreach_norm", "_foreach_mul_",
        "_foreach_add_", "_fused_adam_", "_foreach_add_", "_fused_adam_",  # Adam, which first counts its steps
    ]  # fmt: skip
    assert calls.largest <= 2 * len(decayed)  # norms and factors: no copy of weights or gradients


def test_zero_learning_rate_changes_nothing() -> None:
    parameters = with_gradients(tensors(0), tensors(1))
    Lars(torch.optim.Adam(parameters, lr=0.0, fused=True)).step()
    assert all(torch.equal(p, w) for p, w in zip(parameters, tensors(0), strict=True))


def test_mixed_precisions_in_one_group() -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    Lars(torch.optim.Adam(parameters, lr=1.0)).step()
    torch.testing.assert_close(parameters[0].grad, torch.full((3,), 0.02))
    torch.testing.assert_close(parameters[0].double(), parameters[1], atol=1e-6, rtol=0)


def run(lars: Lars, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, tensors(100 + step), strict=True):
            parameter.grad = gradient
        lars.step()


def test_state_dict_round_trip_continues_bit_identically() -> None:
    ours = with_gradients(tensors(0), tensors(1))
    whole = Lars(torch.optim.Adam(ours, lr=0.01, weight_decay=0.1, fused=True))
    run(whole, ours, range(3))
    saved, weights = copy.deepcopy(whole.state_dict()), [p.detach().clone() for p in ours]
    run(whole, ours, range(3, 6))

    theirs = [nn.Parameter(weight) for weight in weights]
    resumed = Lars(torch.optim.Adam(theirs, lr=9.0, fused=True))
    resumed.load_state_dict(saved)
    assert resumed.param_groups is resumed.inner.param_groups
    assert resumed.param_groups[0]["lr"] == 0.01
    run(resumed, theirs, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert saved.keys() == torch.optim.Adam(theirs).state_dict().keys()


def test_schedulers_drive_the_inner_optimiser() -> None:
    parameters = with_gradients(tensors(0), tensors(1))
    lars = Lars(torch.optim.Adam(parameters, lr=2.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(lars, lambda step: learning_rate_factor(step, 10, 3))
    rates = []
    for _ in range(11):
        rates.append(lars.inner.param_groups[0]["lr"])
        lars.step()
        schedule.step()
    assert rates == pytest.approx([2 * learning_rate_factor(step, 10, 3) for step in range(11)])


def test_added_groups_reach_the_inner_optimiser() -> None:
    lars = Lars(torch.optim.Adam(with_gradients(tensors(0), tensors(1)), lr=0.5))
    lars.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.25})
    assert [group["lr"] for group in lars.inner.param_groups] == [0.5, 0.25]
    assert lars.param_groups[1]["weight_decay"] == 0


def test_grad_scaler_unscales_before_the_norms_and_skips_overflow() -> None:
    plain, scaled = with_gradients(tensors(0), tensors(1)), with_gradients(tensors(0), tensors(1))
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
    reference, lars = Lars(torch.optim.Adam(plain, **options)), Lars(torch.optim.Adam(scaled, **options))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))  # creates the scale tensor
    run(reference, plain, range(2))
    for step in range(2):
        for parameter, gradient in zip(scaled, tensors(100 + step), strict=True):
            parameter.grad = gradient * 1024
        if step == 1:
            scaler.unscale_(lars)  # by hand, as for clipping: it must not happen twice
        scaler.step(lars)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))

    before, state = [p.detach().clone() for p in scaled], copy.deepcopy(lars.state_dict())
    for parameter in scaled:
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(lars)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, scaled, strict=True))
    after = lars.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for index, entries in state["state"].items():
        assert all(torch.equal(entries[key], after["state"][index][key]) for key in entries)


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
    assert build_optimizer(OptimConfig(), model.named_parameters(), 2048).param_groups[0]["lr"] == pytest.approx(
        4.5e-3, rel=0.01
    )
    assert build_optimizer(OptimConfig(lr=0.1), model.named_parameters(), 2048).param_groups[1]["lr"] == 0.1


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    lars = build_optimizer(
        OptimConfig(weight_decay=0.5, trust_coefficient=0.1, clip=False, eps=0.1), [*model.named_parameters()], 1
    )
    assert [group["params"] for group in lars.param_groups] == [[model.weight]]
    assert (lars.param_groups[0]["weight_decay"], lars.trust_coefficient, lars.clip, lars.eps) == (0.5, 0.1, False, 0.1)


def test_apex_only_matters_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    namesake = types.ModuleType("apex")  # what PyPI has under this name
    monkeypatch.setitem(sys.modules, "apex", namesake)
    assert "torch's Adam, fused" in describe(build_optimizer(OptimConfig(), model.named_parameters(), 1))
    with pytest.raises(
        UserError, match=r'optim.backend = "apex".*github.com/NVIDIA/apex.*optim.backend = "torch"'
    ) as caught:
        build_optimizer(OptimConfig(backend="apex"), model.named_parameters(), 1)
    assert "\n" not in str(caught.value)

    class FusedAdam(torch.optim.Adam):
        __module__ = "apex.optimizers.fused_adam"

    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    asked = build_optimizer(OptimConfig(backend="apex"), model.named_parameters(), 1)
    assert describe(asked) == "LARS around apex's FusedAdam"
    assert "torch's" in describe(build_optimizer(OptimConfig(), model.named_parameters(), 1))  # no GPU in use
    assert "torch's" in describe(build_optimizer(OptimConfig(backend="torch"), model.named_parameters(), 1))


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


def test_config_refuses_values_out_of_range() -> None:
    for key, value in {"lr": 0.0, "weight_decay": -1.0, "trust_coefficient": 0.0, "warmup_epochs": -1.0}.items():
        with pytest.raises(ValidationError, match="greater than"):
            OptimConfig(**{key: value})  # type: ignore[arg-type]


def test_lars_on_weights_leaves_the_gradient_of_vectors_as_it_is() -> None:
    """With the same start and gradients: the matrix as under LARS, the vector as under Adam alone."""
    start = [torch.randn(3, 4), torch.randn(4)]
    gradients = [torch.randn(3, 4), torch.randn(4)]
    after = {}
    for name, options in (("all", {}), ("weights", {"lars": "weights"}), ("off", {"trust_coefficient": 1e6})):
        parameters = with_gradients(start, gradients)
        config = OptimConfig(lr=0.1, weight_decay=0.0, **options)
        optimizer = build_optimizer(config, [("linear.weight", parameters[0]), ("linear.bias", parameters[1])], batch=1)
        optimizer.step()
        parameters[0].grad, parameters[1].grad = -3 * gradients[0], 2 * gradients[1]  # Adam's first step has no scale
        optimizer.step()
        after[name] = parameters
    assert torch.equal(after["weights"][0], after["all"][0])
    assert torch.equal(after["weights"][1], after["off"][1])
    assert not torch.allclose(after["all"][0], after["off"][0])
    assert not torch.allclose(after["all"][1], after["off"][1])


@pytest.mark.parametrize("least_dims", [0, 2])
def test_vectors_that_are_not_scaled_still_decay(least_dims: int) -> None:
    """As in torch's Adam alone, whose weight decay is added to the gradient; float64, of the vector with a decay."""
    start = [torch.randn(4, dtype=torch.float64) for _ in range(2)]
    gradients = [torch.randn(4, dtype=torch.float64) for _ in range(2)]
    ours, theirs = with_gradients(start, gradients), with_gradients(start, gradients)
    config = OptimConfig(lr=0.1, weight_decay=0.3, decay_exempt="upstream", lars="weights" if least_dims else "all")
    ours_step = build_optimizer(config, [("stem.norm.weight", ours[0]), ("stem.norm.bias", ours[1])], batch=1)
    groups = [{"params": [theirs[0]], "weight_decay": 0.3}, {"params": [theirs[1]], "weight_decay": 0.0}]
    theirs_step = torch.optim.Adam(groups, lr=0.1)
    for factor in (1.0, -3.0, 0.0):
        for parameter, gradient in zip(ours + theirs, gradients * 2, strict=True):
            parameter.grad = factor * gradient
        ours_step.step()
        theirs_step.step()
    for our, their in zip(ours, theirs, strict=True):
        assert torch.allclose(our, their, rtol=1e-12, atol=1e-14) == (least_dims == 2)
    assert [group["weight_decay"] for group in ours_step.param_groups] == [0.3, 0.0]


def test_the_gradient_of_a_vector_is_its_own_plus_the_decay() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    weight.grad = torch.tensor([0.25, 0.0], dtype=torch.float64)
    Lars(torch.optim.SGD([weight], lr=0.5, weight_decay=0.1), least_dims=2).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.825, -1.9], dtype=torch.float64))

"""`Lars` against the formulas of apex's LARC, written as loops in float64 before torch's optimisers.

apex/parallel/LARC.py as of the commit before cb65b8ed, which removed it. lightly's LARS differs, where there is weight
decay, in that it does not clip; docs/fidelity.md has the table of what else differs.
"""

import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from peclr_dali import Lars
from peclr_dali.train.steps.optim import learning_rate_factor
from tests.train.tiny_step import Operators

SHAPES = [(4, 3), (5,), (2, 3, 3, 3), (1,)]
LR, TRUST, EPS = 0.05, 0.02, 1e-8


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()


def with_gradients(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    set_gradients(parameters, gradients)
    return parameters


def larc(w: list[float], g: list[float], decay: float, *, clip: bool = True, lr: float = LR) -> list[float]:
    """The gradient as LARC leaves it for the inner optimiser, whose weight decay is 0 meanwhile."""
    if math.hypot(*w) == 0 or math.hypot(*g) == 0:
        return g
    adaptive_lr = TRUST * math.hypot(*w) / (math.hypot(*g) + math.hypot(*w) * decay + EPS)
    if clip:
        adaptive_lr = min(adaptive_lr / lr, 1)
    return [(gi + decay * wi) * adaptive_lr for gi, wi in zip(g, w, strict=True)]


INNER: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.0}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"fused": False}), (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"fused": False}),  # whose decay is inside the factor, as in apex, and none its own
]  # fmt: skip


def difference(inner: tuple[Any, dict[str, Any]], decay: float, clip: bool, zero: str, least_dims: int) -> float:
    """Largest difference of a weight after four steps of ours and of torch's on gradients that the loops scale."""
    kind, options = inner
    starts = tensors(0)
    if zero == "weight":
        starts[1].zero_()
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    lars = Lars(kind(ours, lr=LR, weight_decay=decay, **options), TRUST, clip, EPS, least_dims=least_dims)
    plain = kind(theirs, lr=LR, weight_decay=0.0, **options)
    for step, size in enumerate((2.0, 0.05, 2.0, 2.0)):  # the clip acts at the second step
        gradients = tensors(10 + step, size)
        if zero == "gradient":
            gradients[2].zero_()
        set_gradients(ours, gradients)
        lars.step()
        for weight, gradient in zip(theirs, gradients, strict=True):
            w, g = weight.flatten().tolist(), gradient.flatten().tolist()
            unscaled = [gi + decay * wi for gi, wi in zip(g, w, strict=True)]
            scaled = unscaled if gradient.ndim < least_dims else larc(w, g, decay, clip=clip)
            weight.grad = torch.tensor(scaled, dtype=torch.float64).view_as(weight)
        plain.step()
    assert lars.param_groups[0]["weight_decay"] == decay
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("zero", ["none", "weight", "gradient"])
def test_equals_apex(zero: str, inner: tuple[Any, dict[str, Any]]) -> None:
    """Also where vectors are not scaled: they decay as in the inner optimiser alone."""
    for clip, decay, least_dims in itertools.product((True, False), (0.0, 0.3), (0, 2)):
        assert difference(inner, decay, clip, zero, least_dims) < 1e-13, (clip, decay, least_dims)


def test_around_an_optimiser_without_weight_decay() -> None:
    (parameter,) = with_gradients(tensors(0)[:1], tensors(1)[:1])
    lars = Lars(torch.optim.Rprop([parameter], lr=LR))
    lars.step()
    trust = TRUST * float(tensors(0)[0].norm() / tensors(1)[0].norm())
    torch.testing.assert_close(parameter.grad, min(trust / LR, 1) * tensors(1)[0])
    assert "weight_decay" not in lars.param_groups[0]


def test_groups_have_their_own_decay_and_rate_and_missing_gradients_are_skipped() -> None:
    first, second, third = with_gradients(tensors(0)[:3], tensors(1)[:3])
    third.grad = None
    groups = [{"params": [first], "weight_decay": 0.5, "lr": 0.1}, {"params": [second, third], "weight_decay": 0.0}]
    Lars(torch.optim.Adam(groups, lr=0.01)).step()
    for index, parameter, decay, lr in ((0, first, 0.5, 0.1), (1, second, 0.0, 0.01)):
        weight, gradient = (of[index].flatten().tolist() for of in (tensors(0), tensors(1)))
        expected = torch.tensor(larc(weight, gradient, decay, lr=lr), dtype=torch.float64)
        torch.testing.assert_close(parameter.grad, expected.view_as(parameter))
    assert torch.equal(third, tensors(0)[2])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.3])
def test_gradients_of_kernels_and_of_zeros(decay: float, dtype: torch.dtype, bound: float) -> None:
    """Channels-last and 1 x 1 kernels, and where weights, gradients or both are zero."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4, 3, 3), (8, 4, 1, 1), (16, 8), (8,), (8,), (8,), (1,)]
    weights, gradients = (
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes] for _ in range(2)
    )
    weights[0], weights[1] = (tensor.contiguous(memory_format=torch.channels_last) for tensor in weights[:2])
    for zero in (weights[4], gradients[5], weights[6], gradients[6]):
        zero.zero_()
    parameters = with_gradients(weights, gradients)
    Lars(torch.optim.SGD(parameters, lr=0.02, weight_decay=decay)).step()  # some factors below 1, some clamped
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        expected = larc(weight.double().flatten().tolist(), gradient.double().flatten().tolist(), decay, lr=0.02)
        wanted = torch.tensor(expected, dtype=torch.float64).to(dtype).view_as(parameter)
        torch.testing.assert_close(parameter.grad, wanted, atol=bound, rtol=bound)


def test_a_group_is_scaled_by_three_calls_on_its_tensors() -> None:
    """One for all norms, one for the decay, which an exempt group does not need, and one for the factor."""
    decayed = with_gradients([torch.ones(100, 100)] * 5, [torch.ones(100, 100)] * 5)
    exempt = with_gradients([torch.ones(100)], [torch.ones(100)])
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt}]
    lars = Lars(torch.optim.Adam(groups, fused=True))
    lars.step()  # makes the state
    with Operators() as ran:
        lars.step()
    assert {name: count for (name, _), count in ran.counts.items() if name.startswith(("_foreach", "_fused"))} == {
        "_foreach_norm": 2, "_foreach_mul_": 2, "_foreach_add_": 1 + 2, "_fused_adam_": 2,  # Adam counts its steps
    }  # fmt: skip
    assert ran.largest <= 2 * len(decayed)  # norms and factors: no copy of weights or gradients


def test_zero_learning_rate_changes_nothing() -> None:
    parameters = with_gradients(tensors(0), tensors(1))
    Lars(torch.optim.Adam(parameters, lr=0.0, fused=True)).step()
    assert all(torch.equal(p, w) for p, w in zip(parameters, tensors(0), strict=True))


def test_mixed_precisions_in_one_group() -> None:
    ones = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    parameters = with_gradients(ones, ones)
    Lars(torch.optim.Adam(parameters, lr=1.0)).step()
    torch.testing.assert_close(parameters[0].grad, torch.full((3,), 0.02))
    torch.testing.assert_close(parameters[0].double(), parameters[1], atol=1e-6, rtol=0)


def take_steps(lars: Lars, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, tensors(100 + step))
        lars.step()


def test_state_dict_round_trip_continues_bit_identically() -> None:
    ours = with_gradients(tensors(0), tensors(1))
    whole = Lars(torch.optim.Adam(ours, lr=0.01, weight_decay=0.1, fused=True))
    take_steps(whole, ours, range(3))
    saved, theirs = copy.deepcopy(whole.state_dict()), [nn.Parameter(p.detach().clone()) for p in ours]
    take_steps(whole, ours, range(3, 6))

    resumed = Lars(torch.optim.Adam(theirs, lr=9.0, fused=True))
    resumed.load_state_dict(saved)
    assert resumed.param_groups is resumed.inner.param_groups
    assert resumed.param_groups[0]["lr"] == 0.01
    take_steps(resumed, theirs, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert saved.keys() == torch.optim.Adam(theirs).state_dict().keys()


def test_schedulers_drive_the_inner_optimiser() -> None:
    lars = Lars(torch.optim.Adam(with_gradients(tensors(0), tensors(1)), lr=2.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(lars, lambda step: learning_rate_factor(step, 10, 3))
    rates = []
    for _ in range(11):
        rates.append(lars.inner.param_groups[0]["lr"])
        lars.step()
        schedule.step()
    assert rates == pytest.approx([2 * learning_rate_factor(step, 10, 3) for step in range(11)])


def test_grad_scaler_unscales_before_the_norms_and_skips_overflow() -> None:
    plain, scaled = with_gradients(tensors(0), tensors(1)), with_gradients(tensors(0), tensors(1))
    reference, lars = (Lars(torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True)) for p in (plain, scaled))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))  # creates the scale tensor
    take_steps(reference, plain, range(2))
    for step in range(2):
        set_gradients(scaled, tensors(100 + step, 1024.0))
        if step == 1:
            scaler.unscale_(lars)  # by hand, as for clipping: it must not happen twice
        scaler.step(lars)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))

    before, state = [p.detach().clone() for p in scaled], copy.deepcopy(lars.state_dict())
    set_gradients(scaled, [torch.full_like(p, math.inf) for p in scaled])
    scaler.step(lars)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, scaled, strict=True))
    torch.testing.assert_close(lars.state_dict(), state, rtol=0, atol=0)


def test_a_closure_gives_the_gradients_and_its_loss_is_returned() -> None:
    weight = nn.Parameter(torch.full((3,), 5.0))
    optimiser = copy.deepcopy(Lars(torch.optim.SGD([weight], lr=0.1), trust_coefficient=1, clip=False))
    (copied,) = optimiser.param_groups[0]["params"]

    def closure() -> float:
        optimiser.zero_grad()
        loss = copied.square().sum()
        loss.backward()
        return float(loss.detach())

    assert [optimiser.step(closure) for _ in range(2)] == pytest.approx([75.0, 75.0 * 0.9**2])
    optimiser.inner.load_state_dict(optimiser.inner.state_dict())  # which replaces its groups
    assert optimiser.param_groups is optimiser.inner.param_groups
    torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0)  # which binds `step` to this object
    twin = pickle.loads(pickle.dumps(optimiser))
    before = copied.detach().clone()
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()
    assert torch.equal(copied, before)
    with pytest.raises(ValueError, match="the inner optimiser maximises"):
        Lars(torch.optim.SGD([weight], lr=0.1, maximize=True))

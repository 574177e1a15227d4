"""Running statistics take one momentum step per optimiser step."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.train.tiny_step import Operators, Recompute, exact_step, images, network, norms, run, to_double


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_running_statistics_take_one_step_towards_the_mean_over_micro_batches(recompute: Recompute) -> None:
    model = network()
    means, variances = [], []
    batch = images(6)
    convolutions = [module for module in model if isinstance(module, nn.Conv2d)]
    for start in range(0, 6, 2):
        x = torch.cat([to_double(view.image[start : start + 2]) for view in batch.views])
        for convolution, norm in zip(convolutions, norms(model), strict=True):
            x = convolution(x)
            channels = x.detach().transpose(0, 1).flatten(1)
            means.append(channels.mean(1))
            variances.append(channels.var(1, unbiased=True))
            x = F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True))
    for norm in norms(model):
        nn.init.constant_(norm.get_buffer("running_mean"), 0.5)
    run(model, 6, 2, recompute)
    for k, (norm, momentum) in enumerate(zip(norms(model), (0.1, 0.3), strict=True)):
        mean, variance = torch.stack(means[k::2]).mean(0), torch.stack(variances[k::2]).mean(0)
        torch.testing.assert_close(norm.running_mean, (1 - momentum) * 0.5 + momentum * mean, atol=1e-12, rtol=0)
        torch.testing.assert_close(norm.running_var, (1 - momentum) * 1.0 + momentum * variance, atol=1e-12, rtol=0)
        assert norm.num_batches_tracked == 1
        assert norm.momentum == momentum


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_counters_are_touched_once_in_a_step(recompute: Recompute) -> None:
    """On a GPU each batch norm would launch a kernel for its own in each pass, and others to keep the old values."""
    model, batch = network(), images(6)
    step = exact_step(model, batch=6, micro_batch=2, recompute=recompute)
    with Operators() as ran:
        step(batch)
    touching = {name: count for (name, dtype), count in ran.counts.items() if dtype == torch.int64}
    assert touching == {"_foreach_add_": 1}


def test_an_exception_leaves_the_buffers_as_they_were() -> None:
    """In the third micro-batch, behind its batch norms."""
    model = network()
    model[-1].register_forward_hook(Mock(side_effect=[None, None, RuntimeError("broken")]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="broken"):
        run(model, 6, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [norm.momentum for norm in norms(model)] == [0.1, 0.3]


def test_a_synchronised_norm_is_refused() -> None:
    model = network()
    model[1] = nn.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="found a SyncBatchNorm, expected BatchNorm"):
        run(model, 6, 2)


def test_those_of_instance_norm_do_not_depend_on_what_is_computed_twice() -> None:
    statistics = []
    for recompute in ("never", "always"):
        model = network()
        model[1] = nn.InstanceNorm2d(4, track_running_stats=True, dtype=torch.float64)
        run(model, 6, 2, recompute)
        statistics.append(model[1].get_buffer("running_mean"))
    assert torch.equal(*statistics)

"""Running statistics of batch and instance norm under micro-batches and ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from peclr_dali.train.distributed.world import World


@contextmanager
def one_momentum_step(network: nn.Module, world: World, micro_batches: int) -> Iterator[Callable[[], None]]:
    """Make one update of the running statistics for all forward passes in the `with` block.

    Yields a function to call after each forward pass that counts. At the end, each buffer moves from its old value,
    with its module's momentum, towards the mean of the statistics of these passes over all ranks, and
    `num_batches_tracked` grows by one. After an exception the buffers have their old values. Modules in eval mode are
    not changed.

    During the block the momentum is 1, so that after a pass the buffers hold the statistics of this pass. So the
    forward pass needs no hook and may be compiled, and nothing waits for the GPU. The modules have no counters
    meanwhile: on a GPU, each pass would launch a kernel for each of them.

    `micro_batches` is the number of counted passes over all ranks.

    Raises:
        ValueError: a module has momentum None, a cumulative mean, or is a SyncBatchNorm.
    """
    modules = [m for m in network.modules() if isinstance(m, _NormBase) and m.training and m.running_mean is not None]
    momenta = [module.momentum for module in modules if module.momentum is not None]
    if len(momenta) < len(modules):
        raise ValueError("a batch norm has momentum None, expected a number")
    if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        raise ValueError("found a SyncBatchNorm, expected BatchNorm: it sees one micro-batch, of any number of ranks")
    means = [m.running_mean for m in modules if m.running_mean is not None]
    variances = [m.running_var for m in modules if m.running_var is not None]
    counters = [module.num_batches_tracked for module in modules]
    if not modules:
        yield lambda: None
        return

    buffers = means + variances
    before, sums = ([torch.empty_like(buffer) for buffer in buffers] for _ in range(2))
    torch._foreach_copy_(before, buffers)
    torch._foreach_zero_(sums)
    try:
        for module in modules:
            module.momentum, module.num_batches_tracked = 1.0, None
        yield lambda: torch._foreach_add_(sums, buffers)
        world.sum_in_buckets_(sums)
        torch._foreach_div_(sums, micro_batches)
        torch._foreach_copy_(buffers, before)
        torch._foreach_lerp_(buffers, sums, momenta * 2)
        torch._foreach_add_([counter for counter in counters if counter is not None], 1)
    except BaseException:
        torch._foreach_copy_(buffers, before)
        raise
    finally:
        for module, momentum, counter in zip(modules, momenta, counters, strict=True):
            module.momentum, module.num_batches_tracked = momentum, counter

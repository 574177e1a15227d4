"""What training steps in micro-batches share: sums of gradients, and running statistics of batch norm, over ranks."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _NormBase

from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import BucketSum, World, buckets
from peclr_dali.train.steps.stopwatch import Stopwatch


@dataclass(eq=False)
class MicroBatchStep:
    """Computes the gradient of one global batch. The caller runs the optimiser.

    Batch norm sees one micro-batch; running statistics take one momentum step per call (see `one_momentum_step`). So
    loss, gradient and buffers depend on `micro_batch`, but not on the number of ranks, up to the order of sums.

    Attributes:
        network: the network whose parameters get the gradient.
        batch: number of samples in a global batch.
        micro_batch: number of samples that go through the network together; divides `batch`.
        scaler: scales the gradients, which the caller unscales (fp16). By default it is off.
        world: rank and device of this process.
        share: the positions within the global batch that this rank's batches hold.
        own_work: stopwatch of this rank's own work, without waiting for other ranks.

    Raises:
        UserError: `batch` is not made of whole micro-batches, or there are fewer of them than ranks.
    """

    network: nn.Module
    _: KW_ONLY
    batch: int
    micro_batch: int
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    world: World = field(default_factory=World)
    share: range = field(init=False)
    own_work: Stopwatch = field(init=False, default_factory=Stopwatch)
    _sums: "GradientSums | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        rank, world_size = self.world.rank, self.world.world_size
        self.share = micro_batch_share(self.batch, self.micro_batch, rank, world_size, table="")

    def begin(self, batch: Sized) -> list[slice]:
        """Drop earlier gradients. Returns the rows of each micro-batch of this rank's share.

        Raises:
            ValueError: the batch is of another size than this rank's share.
        """
        if len(batch) != len(self.share):
            raise ValueError(
                f"a batch of {len(batch)} samples, but this rank's share is {len(self.share)}: give make_loader "
                f"the step's batch, and micro_batch = {self.micro_batch}"
            )
        for parameter in self.network.parameters():
            parameter.grad = None
        return [slice(start, start + self.micro_batch) for start in range(0, len(batch), self.micro_batch)]

    def backward(self, result: Tensor, gradient: Tensor | None = None, *, last: bool) -> None:
        """Add a micro-batch's gradient to `.grad`, given that of its result; None if the result is the loss.

        A hook on a parameter's gradient sees the micro-batch's, or, in the last call of several ranks, the sum.

        The step's last call begins the sums over ranks, which `sum_gradients` ends.
        """
        trained = [p for p in self.network.parameters() if p.requires_grad]
        if last and self.world.world_size > 1:
            self._sums = GradientSums(self.world, trained)
            self._sums.backward(result, gradient)
            return
        # Autograd would add each tensor's gradient by a kernel of its own.
        before = [p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        torch.autograd.backward(result, gradient)
        pairs = [(p, old) for p, old in zip(trained, before, strict=True) if old is not None]
        if new := [(old, p.grad) for p, old in pairs if p.grad is not None]:
            torch._foreach_add_([old for old, _ in new], [grad for _, grad in new])
        for parameter, old in pairs:
            parameter.grad = old

    def sum_gradients(self) -> None:
        """End the sums of the gradients over all ranks."""
        if self._sums is not None:
            self._sums.end()


class GradientSums:
    """Sums gradients over ranks, in buckets, while the backward pass computes the rest of them.

    A bucket begins when its gradients are there, on all ranks in the same order: the last parameters come first, as in
    the backward pass. Without `world.overlaps` they all begin after it.
    """

    def __init__(self, world: World, parameters: Sequence[nn.Parameter]) -> None:
        self._world, self._parameters = world, parameters
        self._waiting = [*buckets(parameters)][::-1]
        self._there: set[Tensor] = set()
        self._begun: list[BucketSum] = []

    def backward(self, result: Tensor, gradient: Tensor | None = None) -> None:
        """Run the backward pass, and begin the sums during it or at its end."""
        hooks = [
            p.register_post_accumulate_grad_hook(self._begin)  # type: ignore[no-untyped-call]
            for p in (self._parameters if self._world.overlaps else ())
        ]
        try:
            torch.autograd.backward(result, gradient)
        finally:
            for hook in hooks:
                hook.remove()
        self._begin(*self._parameters)  # also of those that the network does not use

    def end(self) -> None:
        """Write the sums to `.grad`."""
        for bucket in self._begun:
            bucket.end()

    def _begin(self, *computed: Tensor) -> None:
        """Note the parameters whose gradients are computed, and begin the buckets that are now complete."""
        self._there.update(computed)
        while self._waiting and self._there.issuperset(self._waiting[0]):
            if gradients := [p.grad for p in self._waiting.pop(0) if p.grad is not None]:
                self._begun.append(self._world.begin_sum_(gradients))


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


def casts_once(device: torch.device) -> torch.autocast:
    """In the `with` block, autocast casts each weight once, for all micro-batches; do not change weights in it.

    Autocast itself stays on or off. It forgets its casts where its outermost block ends, and this is one. In a compiled
    network it has no effect: there the casts are part of the graph, and run in each micro-batch.
    """
    kind = device.type
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))

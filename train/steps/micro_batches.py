"""The common part of training steps in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World, buckets
from peclr_dali.train.steps.stopwatch import Stopwatch


@dataclass(eq=False)
class MicroBatchStep:
    """Computes the gradient of one global batch. The caller runs the optimiser.

    Batch norm sees one micro-batch; running statistics take one momentum step per call (see `batch_statistics`). So
    loss, gradient and buffers depend on `micro_batch`, but not on the number of ranks, up to the order of sums.

    Attributes:
        network: the network whose parameters get the gradient.
        batch: number of samples in a global batch.
        micro_batch: number of samples that go through the network together; divides `batch`.
        scaler: scales the gradients, which the caller unscales (fp16).
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
    scaler: GradScaler | None = None
    world: World = field(default_factory=World)
    share: range = field(init=False)
    own_work: Stopwatch = field(init=False, default_factory=Stopwatch)
    _sums: list[Callable[[], None]] = field(init=False, default_factory=list)

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
            with begun_sums(self.world, trained) as self._sums:
                torch.autograd.backward(result, gradient)
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
        for end in self._sums:
            end()


@contextmanager
def begun_sums(world: World, parameters: Sequence[nn.Parameter]) -> Iterator[list[Callable[[], None]]]:
    """Begin to sum gradients over ranks while the backward pass in the `with` block computes the rest of them.

    Each bucket begins when its gradients are there, on all ranks in the same order: the last parameters come first, as
    in the backward pass. Without `world.overlaps` they all begin after it. Yields the functions that end the sums.
    """
    left = [*buckets(parameters)][::-1]
    there: set[Tensor] = set()
    ends: list[Callable[[], None]] = []

    def begin(*new: Tensor) -> None:
        there.update(new)
        while left and there.issuperset(left[0]):
            if gradients := [p.grad for p in left.pop(0) if p.grad is not None]:
                ends.append(world.begin_sum_(gradients))

    watched = parameters if world.overlaps else ()
    hooks = [p.register_post_accumulate_grad_hook(begin) for p in watched]  # type: ignore[no-untyped-call]
    try:
        yield ends
    finally:
        for hook in hooks:
            hook.remove()
    begin(*parameters)  # also of those that the network does not use

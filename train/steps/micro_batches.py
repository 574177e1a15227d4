"""The common part of training steps in micro-batches."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import KW_ONLY, dataclass, field

from torch import nn
from torch.amp.grad_scaler import GradScaler

from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World
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
        TypeError: `network` is no module, or `world` no `World`.
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

    def __post_init__(self) -> None:
        world = self.world
        for name, value, kind in (("network", self.network, nn.Module), ("world", world, World)):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is a {type(value).__name__}, expected a {kind.__name__}")
        self.share = micro_batch_share(self.batch, self.micro_batch, world.rank, world.world_size, table="")

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

    def sum_gradients(self) -> None:
        """Sum the gradients over all ranks."""
        self.world.sum_in_buckets_([p.grad for p in self.network.parameters() if p.grad is not None])

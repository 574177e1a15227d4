"""Ranks: who computes what, and the few collectives that training needs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from errors import RanksLost, UserError
from machine.ranks import described_ranks
from pipelines.samples.order import even_share
from train.config.pretraining import require_whole_micro_batches
from train.distributed.activity import activity
from train.distributed.rendezvous import barrier, connect, interface_to, meet
from train.distributed.watchdog import Watchdog

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those of the run; the default is a run of one process on the CPU.

    With a single process every collective returns at once, so callers need not tell the cases apart.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: processes of the run.
        local_rank: rank among the processes of this machine.
        device: where this process computes.
        local_world_size: processes of the run on this machine, which share its memory.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process logs and saves."""
        return self.rank == 0

    @contextmanager
    def _message(self) -> Iterator[None]:
        """One exchange between all ranks; `RanksLost` if one has left."""
        try:
            with activity.message():
                yield
        except RuntimeError as error:
            if activity.verdict.wait(activity.patience_s):
                time.sleep(60)  # the watchdog ends this process; nothing else is to be said meanwhile
            reason = str(error).strip().splitlines()[0]
            raise RanksLost(
                f"another rank has left while this one, which {activity.doing}, exchanged with it: killed, or its "
                f"host or link is down; look for its own message. Go on with --resume auto ({reason[:200]})"
            ) from error

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.world_size > 1:
            with self._message():
                dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums over ranks in place; gives the same bits to all."""
        if self.world_size > 1:
            with self._message():
                dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.world_size > 1:
            with self._message():
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def gather_objects(self, mine: T) -> list[T]:
        """Plain values of all ranks, by rank; over the hosts' network, so it waits for no GPU."""
        if self.world_size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.world_size
        with self._message():
            dist.all_gather_object(everybody, mine)
        return everybody

    def gather_rows(self, local: Tensor, share: range, total: int, dim: int = 0) -> Tensor:
        """Joins the ranks' rows along `dim`, which may differ in number, in global order; without gradient.

        `local` are this rank's rows and `share` their places; the shares of all ranks partition range(total).
        """
        if self.world_size == 1:
            return local.detach()
        shape = list(local.shape)
        shape[dim] = total
        everything = local.new_zeros(shape)
        everything.narrow(dim, share.start, len(share)).copy_(local.detach())
        return self.sum_(everything)  # exact: every number but one of each sum is zero

    def sum_in_buckets_(self, tensors: list[Tensor], bucket_bytes: int = 32 * 2**20) -> None:
        """Sums each tensor over ranks in place, in few collectives: tensors are packed until a bucket is full.

        All ranks must pass tensors of the same shapes and dtypes in the same order.
        """
        if self.world_size == 1:
            return
        bucket: list[Tensor] = []
        for tensor, following in zip(tensors, [*tensors[1:], None], strict=True):
            bucket.append(tensor)
            if following is None or following.dtype != tensor.dtype or sum(t.nbytes for t in bucket) >= bucket_bytes:
                flat = self.sum_(torch.cat([t.reshape(-1) for t in bucket]))
                parts = torch.split(flat, [t.numel() for t in bucket])
                torch._foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)])
                bucket = []


def described_world(device: str = "auto") -> World:
    """The run that `torchrun` described in the environment, or a run of one process without it; nobody waits yet.

    Raises:
        UserError: no GPU although asked for, more processes than GPUs on this machine, or an odd environment.
    """
    rank, world_size, local_rank, local_world_size = described_ranks()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'train.device = "cuda", but torch sees no GPU here: set it to "cpu" or "auto", or see nvidia-smi.'
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{local_world_size} processes on this machine, but torch sees {torch.cuda.device_count()} GPUs: "
            "start torchrun with --nproc-per-node of at most that number."
        )
    place = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    return World(rank, world_size, local_rank, place, local_world_size)


@contextmanager
def joined(world: World, rank_timeout_s: float) -> Iterator[None]:
    """Meets the other ranks, if any, and stays with them: NCCL carries what lies on GPUs, Gloo the rest.

    Waits `rank_timeout_s` for a rank that does not come, or that does not get on later.

    Raises:
        UserError: the environment does not say where to meet.
        RanksLost: some ranks, which are named, did not come.
    """
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    store = connect(world.rank, world.world_size, rank_timeout_s)
    room = meet(store, world.rank, world.world_size, rank_timeout_s)
    interface = interface_to(os.environ["MASTER_ADDR"]) if world.world_size > world.local_world_size else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # hosts tell each other small things without a GPU
        store=dist.PrefixStore("process group", room),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=2 * rank_timeout_s),  # the watchdog, which knows names, is to speak first
        device_id=world.device if on_gpu else None,
    )
    try:
        with Watchdog(room, world.rank, world.world_size, activity, rank_timeout_s):
            yield
            # The one that holds the store must not leave while another still asks it.
            barrier(room, "end", world.rank, world.world_size, rank_timeout_s)
    finally:
        dist.destroy_process_group()


def micro_batch_share(batch: int, micro_batch: int, rank: int, world_size: int) -> range:
    """The positions of a global batch that a rank computes.

    Whole micro-batches of consecutive positions, as evenly spread as possible: the first ranks hold one more where the
    number does not divide. What one micro-batch holds depends on neither rank nor world size, and neither
    does what batch norm sees. Batches are counted in source images.

    Raises:
        UserError: the batch is not made of whole micro-batches, or there are fewer of them than ranks.
    """
    require_whole_micro_batches(batch, micro_batch)
    micro_batches = batch // micro_batch
    if micro_batches < world_size:
        raise UserError(
            f"train.batch = {batch} holds {micro_batches} micro-batches of {micro_batch} images, fewer than the "
            f"{world_size} ranks: start fewer processes, or set a smaller train.micro_batch (which changes what batch "
            "norm sees)."
        )
    share = even_share(micro_batches, rank, world_size)
    return range(share.start * micro_batch, share.stop * micro_batch)

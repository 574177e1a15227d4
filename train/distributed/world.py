"""Ranks, their shares of a batch, and the collectives."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from errors import RanksLost, ToldByAnother, UserError
from errors.refused import of_machine
from machine.ranks import described_ranks
from train.distributed.rendezvous import address_towards, barrier, connect, interface_to, leave_last, meet
from train.distributed.watchdog import Watchdog, activity

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank and device of this process. The default is a run of one process on the CPU.

    With a single process every collective returns at once.

    Attributes:
        rank: number of this process, 0 <= rank < world_size.
        world_size: number of processes of the run.
        local_rank: rank among the processes of this machine.
        device: device of this process.
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
        """Wrap a collective: `RanksLost` if another rank has ended.

        Lack of memory and errors of the GPU are raised as they are.
        """
        try:
            with activity.message():
                yield
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            if of_machine(error) is not None and "gloo/transport" not in str(error):  # that is its code for connections
                raise
            if activity.verdict.wait(activity.patience_s):
                time.sleep(60)  # the watchdog has given its message and ends this process
            reason = str(error).strip().splitlines()[0]
            raise RanksLost(
                f"another rank has ended during an exchange with this rank, which {activity.doing}: it was killed, or "
                f"its host or link is down. See that rank's output; go on with --resume auto ({reason[:200]})"
            ) from error

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        if self.world_size > 1:
            with self._message():
                dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; all ranks get the same bits."""
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
        """Gather plain values of all ranks, by rank, over the hosts' network, without waiting for a GPU."""
        if self.world_size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.world_size
        with self._message():
            dist.all_gather_object(everybody, mine)
        return everybody

    def gather_rows(self, local: Tensor, share: range, total: int, dim: int = 0) -> Tensor:
        """Concatenate the ranks' rows along `dim` in global order, without gradient.

        Ranks may have different numbers of rows. `local` holds this rank's rows, `share` their places. The shares of
        all ranks partition range(total).
        """
        if self.world_size == 1:
            return local.detach()
        shape = list(local.shape)
        shape[dim] = total
        everything = local.new_zeros(shape)
        everything.narrow(dim, share.start, len(share)).copy_(local.detach())
        return self.sum_(everything)  # exact, since only one number of each sum is not zero

    def sum_in_buckets_(self, tensors: list[Tensor], bucket_bytes: int = 32 * 2**20) -> None:
        """Sum tensors over ranks, in place. Tensors are packed into buckets, so that there are few collectives.

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
    """The ranks as `torchrun` describes them in the environment, or one process without it. Does not connect yet.

    Raises:
        UserError: a GPU is requested but missing, there are more processes than GPUs, or the environment is
            inconsistent.
    """
    rank, world_size, local_rank, local_world_size = described_ranks()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'train.device = "cuda", but torch sees no GPU here: set it to "cpu" or "auto", or see nvidia-smi.'
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu and local_world_size > torch.cuda.device_count():  # on all ranks of this machine
        raise UserError(
            f"{local_world_size} processes on this machine, but each sees {torch.cuda.device_count()} GPUs: start "
            "torchrun with --nproc-per-node of at most that number, or add --set train.device=cpu"
        )
    place = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    return World(rank, world_size, local_rank, place, local_world_size)


def alone(device: str = "auto") -> World:
    """A world of this process only, on the device that `described_world` gives it: it does all of a task."""
    return World(device=described_world(device).device)


@contextmanager
def joined(world: World, rank_timeout_s: float) -> Iterator[None]:
    """Connect to the other ranks for the `with` block: NCCL for tensors on GPUs, Gloo for the rest.

    `rank_timeout_s`: seconds to wait for a rank that is missing, or that makes no progress later.

    Raises:
        UserError: the address of the store is missing in the environment, or only some ranks have a GPU.
        RanksLost: ranks did not come, and the message names them; or they cannot connect to each other.
    """
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    store = connect(world.rank, world.world_size, rank_timeout_s)
    room = meet(store, world.rank, world.world_size, rank_timeout_s)
    _require_same_kind_of_device(room, world, rank_timeout_s)
    if world.world_size > world.local_world_size:
        _name_interface(room, world, rank_timeout_s)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # small messages between hosts, without a GPU
            store=dist.PrefixStore("process group", room),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=2 * rank_timeout_s),  # later than the watchdog, whose message names the rank
            device_id=world.device if on_gpu else None,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RanksLost(
            f"the ranks have met, but cannot connect to each other ({reason[:200]}). Between hosts, all ports must be "
            "open; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface to use"
        ) from error
    try:
        with Watchdog(room, world.rank, world.world_size, activity, rank_timeout_s):
            yield
            barrier(room, "end", world.rank, world.world_size, rank_timeout_s)
            leave_last(room, "end", world.rank, world.world_size, rank_timeout_s)
    except BaseException:
        # NCCL's end waits for the other ranks, which may wait for this one: the process's end does not.
        if not on_gpu:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _name_interface(room: Store, world: World, timeout_s: float) -> None:
    """Tell Gloo the network interface that leads to the other hosts, unless `GLOO_SOCKET_IFNAME` names one.

    By default it takes the address of this machine's own name, which is often 127.0.1.1 (/etc/hosts). For the same
    reason the host of the store may know itself by loopback only: it asks for the way to another rank's address.
    """
    hosts = [os.environ["MASTER_ADDR"]]
    room.set(f"address/{world.rank}", address_towards(hosts[0]) or "")
    barrier(room, "addresses", world.rank, world.world_size, timeout_s)
    hosts += filter(None, (room.get(f"address/{rank}").decode() for rank in range(world.world_size)))
    interface = next(filter(None, map(interface_to, hosts)), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _require_same_kind_of_device(room: Store, world: World, timeout_s: float) -> None:
    """Refuse GPUs on only some ranks: NCCL would wait for the others."""
    room.set(f"device/{world.rank}", f"{world.device.type} on {platform.node()}")
    barrier(room, "devices", world.rank, world.world_size, timeout_s)
    devices = [room.get(f"device/{rank}").decode() for rank in range(world.world_size)]
    differs = (rank for rank, device in enumerate(devices) if device.split()[0] != devices[0].split()[0])
    rank = next(differs, None)
    if rank is None:
        return
    message = (
        f"the ranks have different devices: rank 0 {devices[0]}, rank {rank} {devices[rank]}. See nvidia-smi there, or "
        "set train.device"
    )
    leave_last(room, "devices", world.rank, world.world_size, timeout_s)
    raise UserError(message) if world.is_main else ToldByAnother(message)

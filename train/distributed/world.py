"""Ranks, their collectives on `torch.distributed`, and what stops all of them after the same step."""

import faulthandler
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from peclr_dali.errors import AnotherRankFailed, UserError, in_one_line
from peclr_dali.ranks import described_ranks
from peclr_dali.train.distributed.interrupt import StopSignals

T = TypeVar("T")
AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_BYTES = 32 * 2**20

# Seconds after the time limit in which torch's own error is expected, before `joined` ends the process.
_GRACE_S = 20.0


@dataclass(frozen=True)
class World:
    """Rank and device of this process. The default is a run of one process on the CPU.

    With a single process every collective returns at once. Tensors on GPUs are exchanged by NCCL, tensors on the CPU
    and plain values by Gloo, without waiting for a GPU.

    Attributes:
        rank: number of this process, 0 <= rank < world_size.
        world_size: number of processes of the run.
        local_rank: rank among the processes of this machine.
        device: device of this process.
        local_world_size: processes of the run on this machine, which share its memory.
        overlaps: whether sums of gradients may begin during the backward pass.
    """

    overlaps: ClassVar[bool] = True
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process logs and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks have come, without waiting for a GPU."""
        if self.world_size > 1:
            with _advice():
                dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; all ranks get the same bits."""
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def _reduce_(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            self.all_reduce_(tensor, operation)
        return tensor

    def all_reduce_(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> dist.Work | None:
        """Combine a tensor of all ranks, in place. All exchanges of tensors are made here.

        With `async_op`, the result is there after `wait` of the returned work.
        """
        with _advice():
            work: dist.Work | None = dist.all_reduce(tensor, op=operation, async_op=async_op)
        return work

    def gather_objects(self, mine: T) -> list[T]:
        """Gather plain values of all ranks, by rank, without waiting for a GPU."""
        if self.world_size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.world_size
        with _advice():
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

    def sum_in_buckets_(self, tensors: list[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Sum tensors over ranks, in place. Tensors are packed into buckets, so that there are few collectives.

        All ranks must pass tensors of the same shapes and dtypes in the same order.
        """
        for bucket in buckets(tensors, bucket_bytes) if self.world_size > 1 else ():
            self.begin_sum_(bucket).end()

    def begin_sum_(self, bucket: list[Tensor]) -> "BucketSum":
        """Begin to sum tensors of one dtype over ranks, in place.

        All ranks must begin the same sums in the same order.
        """
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        return BucketSum(bucket, flat, self.all_reduce_(flat, async_op=True))


@dataclass(frozen=True)
class BucketSum:
    """A sum over ranks that has begun.

    Attributes:
        bucket: the tensors, which get their sums in `end`.
        flat: all their numbers in a row, which are summed.
        work: the exchange; None if it is made in replays of a recorded step.
    """

    bucket: list[Tensor]
    flat: Tensor
    work: dist.Work | None

    def end(self) -> None:
        """Write the sums into the tensors."""
        if self.work is not None:
            with _advice():
                self.work.wait()  # on a GPU, the current stream waits, and not the host
        parts = torch.split(self.flat, [tensor.numel() for tensor in self.bucket])
        torch._foreach_copy_(
            self.bucket, [part.view(tensor.shape) for part, tensor in zip(parts, self.bucket, strict=True)]
        )


def buckets(tensors: Sequence[AnyTensor], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[AnyTensor]]:
    """Split tensors into lists of one dtype and at least so many bytes each, but for the last of a dtype."""
    bucket: list[AnyTensor] = []
    for tensor, following in zip(tensors, [*tensors[1:], None], strict=False):
        bucket.append(tensor)
        if following is None or following.dtype != tensor.dtype or sum(t.nbytes for t in bucket) >= bucket_bytes:
            yield bucket
            bucket = []


@contextmanager
def _advice() -> Iterator[None]:
    """Add a note to torch's error of a collective."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "A collective fails when another rank has ended, hangs, or is late by run.rank_timeout_s. The output of "
            "that rank and torchrun's summary say more. Go on with --resume auto."
        )
        raise


def described_world(device: str = "auto") -> World:
    """The ranks as `torchrun` describes them in the environment, or one process without it. Does not connect yet.

    Raises:
        UserError: a GPU is requested but missing, there are more processes than GPUs, or the environment is
            inconsistent.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device = {device!r}: expected auto, cpu or cuda; a rank's GPU is that of its LOCAL_RANK")
    rank, world_size, local_rank, local_world_size = described_ranks()
    available = device != "cpu" and torch.cuda.is_available()  # torch warns if it cannot use a GPU that is there
    if device == "cuda" and not available:
        raise UserError('train.device = "cuda", but torch sees no GPU here: set it to "cpu" or "auto", see nvidia-smi')
    processes = max(local_world_size, local_rank + 1)  # a launcher may set LOCAL_RANK only
    if available and processes > (gpus := torch.cuda.device_count()):  # on all ranks of this machine
        raise UserError(f"{processes} processes on this machine see {gpus} GPUs: start fewer, or set train.device=cpu")
    place = torch.device("cuda", local_rank) if available else torch.device("cpu")
    return World(rank, world_size, local_rank, place, local_world_size)


def single_process(device: str = "auto") -> World:
    """A world of this process only, on the device that `described_world` gives it: it does all of a task."""
    return World(device=described_world(device).device)


@contextmanager
def joined(world: World, rank_timeout_s: float) -> Iterator[None]:
    """Connect to the other ranks for the `with` block: NCCL for tensors on GPUs, Gloo for the rest.

    After an error in the block the ranks stay connected: NCCL's end would wait for the others. The process should end.

    Args:
        rank_timeout_s: seconds to wait for a rank that is missing, now or in a later collective. If torch does not
            notice when the ranks connect, the process ends 20 s later, with a traceback of all threads.

    Raises:
        UserError: ranks have different kinds of devices.
        RuntimeError: ranks did not come, or cannot connect to each other.
    """
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"{absent[0]} is not set: expected where rank 0 is. Start the processes with torchrun")
    if world.world_size > world.local_world_size:
        _choose_interface(os.environ["MASTER_ADDR"])
    # NCCL's sums overlap with the backward pass. By default its stream has the lowest priority, as the loader's.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # Torch has no limit for NCCL's connecting, nor for a store whose host is silent.
    faulthandler.dump_traceback_later(rank_timeout_s + _GRACE_S, exit=True, file=2)  # the terminal
    limit = timedelta(seconds=rank_timeout_s)
    try:
        store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size, timeout=limit))
        store.set_timeout(limit)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it holds the addresses of the attempts before
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        devices = world.gather_objects(world.device.type)
        if len(set(devices)) > 1:
            by_rank = ", ".join(f"rank {rank}: {device}" for rank, device in enumerate(devices))
            raise UserError(f"the ranks have different devices ({by_rank}). See nvidia-smi there, or set train.device")
        if on_gpu:  # NCCL connects at its first collective
            dist.all_reduce(torch.zeros(1, device=world.device))
            torch.cuda.synchronize(world.device)
    except RuntimeError as error:
        error.add_note(
            f"The {world.world_size} ranks did not all come within {rank_timeout_s:g} s (run.rank_timeout_s), or "
            "cannot connect to each other. Between hosts, all ports must be open; GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME name the network interface to use."
        )
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    yield
    world.barrier()
    dist.destroy_process_group()


def _choose_interface(master: str) -> None:
    """Name to Gloo the network interface on the way to a host, unless `GLOO_SOCKET_IFNAME` names one.

    By default Gloo takes the address of this machine's own name, which is often 127.0.1.1 (/etc/hosts).
    """
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends no packet
            mine = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if name != "lo" and any(address.address == mine for address in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@contextmanager
def on_all_ranks(world: World, stop: StopSignals | None = None) -> Iterator[None]:
    """If the `with` block fails on one rank, it fails on all. Blocks may be nested.

    The ranks exchange a few bytes at the end of the block, without waiting for a GPU; a single process does not.

    Args:
        stop: this rank's stop signals; the ranks exchange them too, and each gets those of all.

    Raises:
        Exception: the error of this rank, on the lowest rank that failed.
        AnotherRankFailed: on all other ranks.
    """
    error: Exception | None = None
    mine = 0
    try:
        yield
    except AnotherRankFailed as raised:  # in an exchange within the block, where that rank has failed
        error = raised
    except Exception as raised:
        error, mine = raised, world.world_size - world.rank  # the lowest failed rank has the highest number
    signal_number = 0 if stop is None else stop.signal_number  # a signal during the exchange counts for the next one
    signal_number, failed = world.max_(torch.tensor([signal_number, mine])).tolist()
    if failed:
        first, reasons = world.world_size - failed, world.gather_objects(in_one_line(error, 1000))
        if error is not None and failed == mine:
            raise error
        raise AnotherRankFailed(f"rank {first} has failed: {reasons[first]}")
    if stop is not None and signal_number:
        stop.signal_number, stop.agreed = signal_number, True


def require_same(world: World, what: str, mine: str, remedy: str) -> None:
    """Require that all ranks describe their own `what` in the same words.

    Raises:
        UserError: on rank 0, one of them differs.
        AnotherRankFailed: on the other ranks.
    """
    everybody = world.gather_objects((mine, platform.node()))
    first, first_host = everybody[0]
    for rank, (other, host) in enumerate(everybody):
        if other != first:
            message = f"rank 0 on {first_host} has {first}, rank {rank} on {host} has {other}"
            raise (UserError if world.is_main else AnotherRankFailed)(
                f"the ranks have different {what}: {message}. {remedy}"
            )

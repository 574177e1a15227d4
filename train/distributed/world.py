"""Ranks, their shares of a batch, and the collectives."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from peclr_dali.errors import RanksLost, ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import machine_error_line
from peclr_dali.errors.terminal import in_one_line
from peclr_dali.machine.ranks import described_ranks
from peclr_dali.train.distributed.rendezvous import (
    Peers,
    address_towards,
    connect,
    in_thread,
    meet,
    name_interface,
    within,
)

T = TypeVar("T")
AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_BYTES = 32 * 2**20

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
"""Seconds between two looks at NCCL while it connects."""

_ABORT_S: Final = 10.0
"""Longest time that NCCL gets to end its kernels after a rank was lost."""

_NOT_CONNECTED: Final = (
    "the ranks have met, but cannot connect to each other ({}). Between hosts, all ports must be open; "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface to use"
)

_peers: Peers | None = None
"""The ranks that this process has joined."""


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

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wrap a collective: one line, which names the missing ranks, if it fails.

        Lack of memory and errors of the GPU are raised as they are.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            # Gloo's own errors are of connections, also where they mention resources.
            if machine_error_line(error) is not None and "gloo/transport" not in str(error):
                raise
            if _peers is not None:
                explained = _peers.explain(error)
                if _peers.group is not None:
                    _abort_nccl()
                raise explained from error
            reason = str(error).strip().splitlines()[0][:200]
            raise RanksLost(f"another rank has ended during an exchange; see its output ({reason})") from error

    def barrier(self) -> None:
        """Wait until all ranks have come, without waiting for a GPU."""
        if self.world_size > 1:
            with self._exchange():
                dist.barrier(_cpu_group())

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
        with self._exchange():
            group = _cpu_group() if tensor.device.type == "cpu" else None
            work: dist.Work | None = dist.all_reduce(tensor, op=operation, group=group, async_op=async_op)
        return work

    def gather_objects(self, mine: T) -> list[T]:
        """Gather plain values of all ranks, by rank, over the hosts' network, without waiting for a GPU."""
        if self.world_size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.world_size
        with self._exchange():
            dist.all_gather_object(everybody, mine, group=_cpu_group())
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
            self.begin_sum_(bucket)()

    def begin_sum_(self, bucket: list[Tensor]) -> Callable[[], None]:
        """Begin to sum tensors of one dtype over ranks, in place. Returns the function that ends it.

        All ranks must begin the same sums in the same order.
        """
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        work = self.all_reduce_(flat, async_op=True)

        def end() -> None:
            if work is not None:
                with self._exchange():
                    work.wait()  # on a GPU, the current stream waits, and not the host
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)])

        return end


def buckets(tensors: Sequence[AnyTensor], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[AnyTensor]]:
    """Split tensors into lists of one dtype and at least so many bytes each, but for the last of a dtype."""
    bucket: list[AnyTensor] = []
    for tensor, following in zip(tensors, [*tensors[1:], None], strict=False):
        bucket.append(tensor)
        if following is None or following.dtype != tensor.dtype or sum(t.nbytes for t in bucket) >= bucket_bytes:
            yield bucket
            bucket = []


def _cpu_group() -> ProcessGroup | None:
    """The process group of tensors on the CPU; None: torch's default."""
    return None if _peers is None else _peers.group


def require_same(world: World, what: str, mine: str, remedy: str) -> None:
    """Raise a `UserError` on all ranks if one of them describes its own `what` in other words than rank 0.

    Rank 0 reports it; on the other ranks it is a `ReportedByAnotherRank`.
    """
    described, hosts = zip(*world.gather_objects((mine, platform.node())), strict=True)
    _refuse_differences(world, what, described, hosts, remedy)


def _refuse_differences(world: World, what: str, described: Sequence[str], hosts: Sequence[str], remedy: str) -> None:
    for rank, (other, host) in enumerate(zip(described, hosts, strict=True)):
        if other != described[0]:
            kind = UserError if world.is_main else ReportedByAnotherRank
            raise kind(
                f"the ranks have different {what}: rank 0 on {hosts[0]} has {described[0]}, rank {rank} on {host} has "
                f"{other}. {remedy}"
            )


def described_world(device: str = "auto") -> World:
    """The ranks as `torchrun` describes them in the environment, or one process without it. Does not connect yet.

    Raises:
        UserError: a GPU is requested but missing, there are more processes than GPUs, or the environment is
            inconsistent.
    """
    rank, world_size, local_rank, local_world_size = described_ranks()
    with warnings.catch_warnings(record=True) as said:  # torch tells once why it cannot use a GPU that is there
        warnings.simplefilter("always")
        available = device != "cpu" and torch.cuda.is_available()
    reason = in_one_line(said[0].message).partition(" (Triggered")[0] if said else ""
    if device == "cuda" and not available:
        raise UserError(
            f'train.device = "cuda", but torch sees no GPU here{reason and f" ({reason})"}: set it to "cpu" or '
            '"auto", or see nvidia-smi.'
        )
    if reason and not available:
        log.warning("torch cannot use this machine's GPU, and the CPU is used: %s", reason)
    processes = max(local_world_size, local_rank + 1)  # a launcher may set LOCAL_RANK only
    if available and processes > torch.cuda.device_count():  # on all ranks of this machine
        raise UserError(
            f"{processes} processes on this machine, but each sees {torch.cuda.device_count()} GPUs: start "
            "torchrun with --nproc-per-node of at most that number, or add --set train.device=cpu"
        )
    place = torch.device("cuda", local_rank) if available else torch.device("cpu")
    return World(rank, world_size, local_rank, place, local_world_size)


def single_process(device: str = "auto") -> World:
    """A world of this process only, on the device that `described_world` gives it: it does all of a task."""
    return World(device=described_world(device).device)


@contextmanager
def joined(world: World, rank_timeout_s: float) -> Iterator[None]:
    """Connect to the other ranks for the `with` block: NCCL for tensors on GPUs, Gloo for the rest.

    `rank_timeout_s`: seconds to wait for a rank that is missing, now or in a later collective. A collective of NCCL
    itself fails after twice that time, since an exchange over Gloo names the rank.

    Raises:
        UserError: the address of the store is missing in the environment, or only some ranks have a GPU.
        RanksLost: ranks did not come, and the message names them; or they cannot connect to each other.
    """
    global _peers
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    store = connect(world.rank, world.world_size, rank_timeout_s)
    mine = json.dumps((world.device.type, platform.node(), address_towards(os.environ["MASTER_ADDR"])))
    everybody = map(json.loads, meet(store, world.rank, world.world_size, mine, rank_timeout_s))
    devices, hosts, addresses = zip(*everybody, strict=True)
    # NCCL would wait for a rank without a GPU.
    _refuse_differences(world, "devices", devices, hosts, "See nvidia-smi there, or set train.device")
    if world.world_size > world.local_world_size:
        # The host of the store may know itself by loopback only: then the way to another rank counts.
        name_interface([os.environ["MASTER_ADDR"], *filter(None, addresses)])
    # A connection of its own: in a thread, NCCL may wait for the store, and hold its connection meanwhile.
    peers = Peers(store.clone(), world.rank, hosts, rank_timeout_s)  # type: ignore[attr-defined]
    exchange_limit = timedelta(seconds=rank_timeout_s - peers.roll_call_s)
    limit = timedelta(seconds=2 * rank_timeout_s) if on_gpu else exchange_limit
    try:
        # Without `device_id`, NCCL connects at its first collective and not here, where nothing would watch it.
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=limit,
            pg_options=_nccl_options(limit) if on_gpu else None,
        )  # fmt: skip
        _peers = replace(peers, group=dist.new_group(backend="gloo", timeout=exchange_limit)) if on_gpu else peers
    except RuntimeError as error:
        raise RanksLost(_NOT_CONNECTED.format(in_one_line(error))) from error
    try:
        if on_gpu:
            _connect_gpus(world, exchange_limit.total_seconds())
        yield
        world.barrier()
    except BaseException as error:
        if _has_a_line(error):
            peers.announce(error)
        # NCCL's end waits for the other ranks, which may wait for this one. The command line leaves such a process at
        # once.
        if not on_gpu:
            dist.destroy_process_group()
        raise
    finally:
        _peers = None
    dist.destroy_process_group()


def _nccl_options(limit: timedelta) -> dist.ProcessGroupNCCL.Options:
    # By default NCCL's stream has the lowest priority, as the loader's: sums that overlap with the backward pass would
    # yield to both, whereas now the loader yields to the step's stream (`trainer.before_the_loader`) and to NCCL's.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit  # the one of `init_process_group`, which else warns
    return options


def _abort_nccl() -> None:
    """End NCCL's kernels that wait for a lost rank. What frees memory of the GPU would wait for them."""
    if (group := dist.group.WORLD) is not None:
        with suppress(RuntimeError, TimeoutError):
            within(_ABORT_S, group.abort)


def _connect_gpus(world: World, limit_s: float) -> None:
    """Take NCCL's first collective, in which it connects. Over Gloo the ranks exchange meanwhile how far they are.

    NCCL has no limit of time for this (its issues 289 and 1677, pytorch's 88103): if a rank ends now, the others would
    wait forever.

    Raises:
        RanksLost: a rank has ended, NCCL fails on this rank, or it has not connected after `limit_s` seconds.
    """

    def first_sum() -> str:
        torch.cuda.set_device(world.device)  # of this thread
        dist.all_reduce(torch.zeros(1, device=world.device))
        torch.cuda.synchronize(world.device)
        return ""

    ends = time.monotonic() + limit_s
    first = in_thread(first_sum)
    while True:
        outcome: str | None = None  # not yet; "": connected
        try:
            outcome = first.result(_LOOK_S)
        except TimeoutError:
            if time.monotonic() > ends:
                outcome = f"NCCL is still connecting after {limit_s:g} s"
        except Exception as error:
            outcome = in_one_line(error)
        everybody = world.gather_objects(outcome)
        failed = next((rank for rank, one in enumerate(everybody) if one), None)
        if failed == world.rank:
            raise RanksLost(_NOT_CONNECTED.format(everybody[failed]))
        if failed is not None:
            raise ReportedByAnotherRank(f"rank {failed} cannot connect: {everybody[failed]}", transient=True)
        if None not in everybody:
            return


def _has_a_line(error: BaseException) -> TypeGuard[Exception]:
    """Whether this rank reports an error in a line of its own, which is not about other ranks."""
    if isinstance(error, UserError):
        return not isinstance(error, (RanksLost, ReportedByAnotherRank))
    return isinstance(error, Exception) and machine_error_line(error) is not None

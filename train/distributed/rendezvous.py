"""Connects the ranks through a store that all can reach, and names ranks that are missing."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.elastic.utils.store import synchronize

from peclr_dali.errors import RanksLost, ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import is_transient

T = TypeVar("T")

_FOREVER = timedelta(days=1)
"""Limit of torch's call inside `within`: torch aborts a process that is exiting when the limit passes."""


def connect(rank: int, world_size: int, timeout_s: float) -> Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT: torchrun's, or one that rank 0 opens.

    Raises:
        UserError: the address is missing in the environment, or another program uses the port.
        RanksLost: the store cannot be reached in time.
    """
    missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ)
    if missing:
        raise UserError(
            f"WORLD_SIZE = {world_size} in the environment, but the ranks cannot meet ({missing} missing): "
            "start them with torchrun, or unset WORLD_SIZE for a run of one process."
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"MASTER_PORT = {port!r} in the environment: expected a port from 1 to 65535, or use torchrun.")
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = rank == 0 and not of_torchrun
    try:
        # Waiting for the others here could not name a missing rank.
        store = within(timeout_s, lambda: TCPStore(host, int(port), None, opens, _FOREVER, wait_for_workers=False))
    except (dist.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT = {port} on {platform.node()} is in use, by another program or another run: "
                f"set another port, the same on all ranks"
            ) from error
        raise RanksLost(
            f"no contact with the host where the ranks meet, {host}:{port}, within {timeout_s:g} s "
            f"(run.rank_timeout_s): {_why_no_contact(host, int(port))}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    # torchrun's store holds the keys of earlier attempts. A store of rank 0 is new, and there the torchruns of several
    # hosts may count the attempts differently.
    return PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store) if of_torchrun else store


def within(timeout_s: float, action: Callable[[], T]) -> T:
    """Run `action()` in a thread; TimeoutError if it takes longer, and the thread is left behind.

    For some answers torch's store waits without limit, and meanwhile ignores Ctrl-C.
    """
    return in_thread(action).result(timeout_s)


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Run `action()` in a thread that does not keep the process alive."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return outcome


def _why_no_contact(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError as error:
        return f"{error}. Is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
    return "something listens there, but does not answer as the ranks' store. Set another MASTER_PORT on all ranks"


def meet(store: Store, rank: int, world_size: int, mine: str, timeout_s: float) -> list[str]:
    """Wait until every rank has come. Returns the texts that the ranks gave as `mine`, by rank.

    Raises:
        RanksLost: ranks did not come in time. Rank 0 names them.
    """
    try:
        return [text.decode() for text in synchronize(store, mine.encode(), rank, world_size, "rank ", timeout_s)]
    except dist.DistError as error:
        if rank != 0:  # or rank 0, whose process may hold the store, has ended
            raise RanksLost(
                f"rank 0 did not begin within {timeout_s:g} s (run.rank_timeout_s): rank 0 or another rank is missing; "
                "see the output of rank 0"
            ) from error
        missing = ", ".join(str(other) for other in range(world_size) if not store.check([f"rank {other}"]))
        raise RanksLost(
            f"rank {missing} of {world_size} did not come within {timeout_s:g} s (run.rank_timeout_s): look at the "
            f"output of that rank and at its host, or allow more time"
        ) from error


@dataclass(frozen=True)
class Peers:
    """The ranks that have met. It finds out which of them do not answer after a collective has failed.

    Torch's errors name an address at most. `monitored_barrier` names ranks that are stopped, but none that was killed,
    and only to rank 0.

    Attributes:
        store: what `connect` returned.
        rank: number of this process.
        hosts: the name of each rank's host.
        limit_s: seconds until a rank that does not answer ends the run, the roll call included.
        group: process group of tensors on the CPU; None: torch's default.
    """

    store: Store
    rank: int
    hosts: Sequence[str]
    limit_s: float
    group: ProcessGroup | None = None

    @property
    def roll_call_s(self) -> float:
        """Seconds of the limit that are kept for the roll call. A rank must answer within half of them."""
        return min(self.limit_s / 3, 20.0)

    def explain(self, failed: RuntimeError) -> UserError:
        """Describe a failed collective in one line, with the ranks that do not answer.

        The lowest rank that answers reports it; for the others it is a `ReportedByAnotherRank`. So it is for all if a
        rank has announced an error of its own.
        """
        ranks = range(len(self.hosts))
        try:
            answers = within(self.roll_call_s, self._roll_call)
            reports = min(answers)
        except (dist.DistError, TimeoutError):  # the store is on rank 0's host
            answers, reports = dict.fromkeys(ranks[1:], ""), self.rank
        if kind := max(answers.values()):
            return ReportedByAnotherRank("another rank has failed; see its output", transient=kind == "transient")
        missing = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks if rank not in answers)
        reason = str(failed).strip().splitlines()[0][:200]
        message = (
            f"no answer from {missing or 'the network between the ranks'}: killed, stopped, cut off from the network, "
            f"or too late for run.rank_timeout_s = {self.limit_s:g} ({reason}). Go on with --resume auto"
        )
        return RanksLost(message) if reports == self.rank else ReportedByAnotherRank(message, transient=True)

    def announce(self, error: Exception) -> None:
        """Answer the coming roll call of the other ranks: this rank fails, and reports the error itself."""

        def answer() -> None:
            self.store.set(f"done {self.rank}", "")
            self.store.set(f"answer {self.rank}", "transient" if is_transient(error) else "final")

        with suppress(dist.DistError, TimeoutError):
            within(self.roll_call_s, answer)

    def _roll_call(self) -> dict[int, str]:
        """The answers of the ranks that answer in time: "", or the kind of the error that the rank reports."""
        ranks, limit = range(len(self.hosts)), timedelta(seconds=self.roll_call_s / 2)
        self.store.set(f"answer {self.rank}", "")
        with suppress(dist.DistStoreError):
            self.store.wait([f"answer {rank}" for rank in ranks], limit)
        there = [rank for rank in ranks if self.store.check([f"answer {rank}"])]
        answers = {rank: self.store.get(f"answer {rank}").decode() for rank in there}
        self.store.set(f"done {self.rank}", "")
        if self.rank == 0:  # whose process may hold the store: it ends last
            with suppress(dist.DistStoreError):
                self.store.wait([f"done {rank}" for rank in there], limit / 2)
        return answers


def address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None for loopback or an unknown host."""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends no packet
            mine = str(probe.getsockname()[0])
            return None if mine.startswith("127.") or mine == "::1" else mine
    return None


def name_interface(hosts: Iterable[str]) -> None:
    """Name to Gloo the network interface that leads to the first host that is not this one.

    By default Gloo takes the address of this machine's own name, which is often 127.0.1.1 (/etc/hosts). A name in
    `GLOO_SOCKET_IFNAME` stays.
    """
    mine = next(filter(None, map(address_towards, hosts)), None)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == mine for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

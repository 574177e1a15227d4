"""Connects the ranks through a store that all can reach, and names ranks that are missing."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from errors import RanksLost, UserError

T = TypeVar("T")

_FOREVER = timedelta(days=1)
"""Time limit of torch's call inside `within`. It is long, since torch aborts a process that is exiting when the limit
passes."""


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

    def open_store() -> Store:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            theirs: Store = next(rendezvous("env://", rank, world_size, timeout=_FOREVER))[0]
            return theirs
        # Waiting for the others here could not name a missing rank.
        return TCPStore(host, int(port), None, rank == 0, _FOREVER, wait_for_workers=False)

    try:
        with _silent_torch():
            store = within(timeout_s, open_store)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
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


def within(timeout_s: float, action: Callable[[], T]) -> T:
    """Run `action()` with a time limit; TimeoutError if it takes longer.

    It runs in a thread, which is left behind at the time limit: for some answers torch's store waits without limit, and
    meanwhile ignores Ctrl-C.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return outcome.result(timeout_s)


@contextmanager
def _silent_torch() -> Iterator[None]:
    """Drop the output of torch's C++ code, a page of stack frames for each attempt to connect.

    After an exception the output stays dropped, since the thread left behind by `within` still tries. Python's own
    `sys.stderr` still reaches the terminal.
    """
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    except BaseException:
        sys.stderr = os.fdopen(terminal, "w", buffering=1)
        raise
    os.dup2(terminal, 2)
    os.close(terminal)


def _why_no_contact(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except socket.gaierror:
        return f"this host ({platform.node()}) knows no address of {host}; check MASTER_ADDR"
    except ConnectionResetError:
        pass
    except ConnectionRefusedError:
        return "nothing listens there; is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
    except OSError:
        return f"is it up, and does the network let this host ({platform.node()}) through?"
    return (
        "something listens there, but does not answer as the ranks' store: another program, or a run that hangs. "
        "Set another MASTER_PORT, the same on all ranks"
    )


def address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None for loopback or an unknown host."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends no packet
            mine = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if mine.startswith("127.") or mine == "::1" else mine


def interface_to(host: str) -> str | None:
    """Name of the network interface that this machine uses to reach a host; None for loopback or an unknown host."""
    mine = address_towards(host)
    names = (name for name, known in psutil.net_if_addrs().items() if any(mine == one.address for one in known))
    return next(names, None)


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """Wait until every rank has come. The store may still contain keys of an earlier attempt.

    Each rank writes a random word. Rank 0 answers each word with its own random word, which names a new room, a part of
    the store. So a word of a dead rank is never taken for that of a living one. The room is returned.

    Raises:
        RanksLost: ranks did not come in time; the message names them.
    """
    mine = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        room = PrefixStore(mine, store)
        missing = list(range(1, world_size))
        while missing:
            for other in missing:
                if store.check([f"hello/{other}"]):
                    store.set(f"welcome/{store.get(f'hello/{other}').decode()}", mine)
            missing = [other for other in missing if not room.check([f"here/{other}"])]
            if missing and time.monotonic() > deadline:
                raise _lost(missing, world_size, timeout_s)
            time.sleep(0.05)
        room.set("begin", "1")
        return room
    store.set(f"hello/{rank}", mine)
    try:
        left = timedelta(seconds=timeout_s)
        store.wait([f"welcome/{mine}"], left)
        room = PrefixStore(store.get(f"welcome/{mine}").decode(), store)
        room.set(f"here/{rank}", platform.node())
        room.wait(["begin"], left)
    except dist.DistError as error:  # time is over, or rank 0 has ended
        raise RanksLost(
            f"rank 0 did not begin within {timeout_s:g} s (run.rank_timeout_s): rank 0 or another rank is missing; "
            f"see the output of rank 0"
        ) from error
    return room


def barrier(room: Store, name: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until every rank has come to this barrier. The name must be new in the room. Errors as in `meet`."""
    room.set(f"{name}/{rank}", "1")
    keys = [f"{name}/{other}" for other in range(world_size)]
    try:
        room.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not room.check([key])]
        raise _lost(missing, world_size, timeout_s) from error
    except dist.DistError as error:
        raise RanksLost("the process where the ranks meet has ended: see the output of rank 0") from error


def leave_last(room: Store, name: str, rank: int, world_size: int, timeout_s: float) -> None:
    """After a barrier: rank 0, whose process may hold the store, waits until the others have read what they need."""
    room.set(f"{name} left/{rank}", "1")
    if rank == 0:
        with suppress(dist.DistStoreError):
            room.wait([f"{name} left/{other}" for other in range(world_size)], timedelta(seconds=timeout_s))


def _lost(ranks: Sequence[int], world_size: int, timeout_s: float) -> RanksLost:
    names = ", ".join(map(str, ranks))
    return RanksLost(
        f"rank {names} of {world_size} did not come within {timeout_s:g} s (run.rank_timeout_s): look at the output "
        f"of that rank and at its host, or allow more time"
    )

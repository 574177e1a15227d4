"""Where ranks meet: a store that all of them reach, and who is missing there."""

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
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from errors import RanksLost, UserError

T = TypeVar("T")

_FOREVER = timedelta(days=1)
"""For a call inside `within`, so that it never returns while the process leaves: torch would abort it."""


def connect(rank: int, world_size: int, timeout_s: float) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's own, or one that rank 0 opens there.

    Raises:
        UserError: the environment does not say where it is, or another program listens there.
        RanksLost: it cannot be reached in time.
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
        # Without waiting for the others in here, where nobody would be named.
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
    """What `action()` returns or raises, or TimeoutError if it takes longer.

    It runs on a thread of its own, which is left behind when the time is over: torch's store waits without limit for
    some answers, and is deaf to Ctrl-C meanwhile.
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
    """Drops what torch's C++ code writes to the terminal: a page of stack frames for each attempt to connect.

    After an exception it stays so, since the thread that `within` leaves behind goes on trying; Python's own
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
        return f"this host ({platform.node()}) knows no address of {host}; look at MASTER_ADDR"
    except ConnectionResetError:
        pass
    except ConnectionRefusedError:
        return "nothing listens there; is rank 0 up, and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
    except OSError:
        return f"is it up, and does the network let this host ({platform.node()}) through?"
    return (
        "something listens there, but does not answer as the ranks' store: another program, or a run that hangs. "
        "Set another MASTER_PORT, the same on all ranks"
    )


def interface_to(address: str) -> str | None:
    """The network interface that this machine uses towards a host; None for the loopback or an unknown host.

    Gloo would take the address that this machine's own name stands for, which on many is 127.0.1.1 (/etc/hosts).
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return None
    if mine.startswith("127.") or mine == "::1":
        return None
    names = (name for name, known in psutil.net_if_addrs().items() if any(mine == one.address for one in known))
    return next(names, None)


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """Waits until every rank is here, on a store that may still hold what ranks of an earlier attempt left.

    Each rank says hello with a word of its own; rank 0 answers each word with the name of a room, its own word, in
    which nobody has been before. So nobody takes a dead rank's word for a living one's. The room, a part of the store,
    is returned.

    Raises:
        RanksLost: naming the ranks that did not come in time.
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
    except dist.DistError as error:  # out of time, or rank 0 has left
        raise RanksLost(
            f"rank 0 did not begin within {timeout_s:g} s (run.rank_timeout_s): it, or another rank, has not come; "
            f"rank 0 names who"
        ) from error
    return room


def barrier(room: Store, name: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Waits until every rank has come to the barrier of this name, new in this room; errors as `meet`."""
    room.set(f"{name}/{rank}", "1")
    keys = [f"{name}/{other}" for other in range(world_size)]
    try:
        room.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not room.check([key])]
        raise _lost(missing, world_size, timeout_s) from error


def _lost(ranks: Sequence[int], world_size: int, timeout_s: float) -> RanksLost:
    names = ", ".join(map(str, ranks))
    return RanksLost(
        f"rank {names} of {world_size} did not come within {timeout_s:g} s (run.rank_timeout_s): look at the output "
        f"of that rank and at its host, or allow more time"
    )

"""Collective errors and stop signals: an error or a signal on one rank stops all ranks after the same step."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from peclr_dali.errors import AnotherRankFailed, UserError
from peclr_dali.train.distributed.world import World

T = TypeVar("T")


def on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Run an action on all ranks. If it fails on one rank, it fails on all.

    Raises:
        Exception: the error of this rank, on the lowest rank that failed.
        AnotherRankFailed: on all other ranks.
    """
    return _agree(world, None, action)[0]


def on_main(world: World, action: Callable[[], T]) -> T | None:
    """Run an action on rank 0, with None as the result on the others. Errors are raised as in `on_all_ranks`."""
    return on_all_ranks(world, lambda: action() if world.is_main else None)


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
            error = UserError if world.is_main else AnotherRankFailed
            raise error(f"the ranks have different {what}: {message}. {remedy}")


def steps_of_all_ranks(world: World, stop: StopSignals, check: Callable[[], None], batches: Iterable[T]) -> Iterator[T]:
    """Yield batches as long as all ranks have one. Errors of a batch and of `check` are raised as in `on_all_ranks`.

    Before every step the ranks exchange whether one of them failed or got a stop signal. This costs one message of a
    few bytes between the hosts, which does not wait for a GPU. With a single process there is none.

    Args:
        stop: this rank's signals; it then gets the signals of all ranks.
        check: raises errors that happened in other threads of this rank since the last step.
    """
    iterator = iter(batches)

    def take() -> T | None:
        check()
        return next(iterator, None)

    while True:
        batch, signal_number = _agree(world, stop, take)
        if batch is None:
            return
        if signal_number:
            stop.signal_number, stop.agreed = signal_number, True
        yield batch


def _agree(world: World, stop: StopSignals | None, action: Callable[[], T]) -> tuple[T, int]:
    """Result of the action on this rank, and the highest signal number of all ranks. Any rank's failure is raised."""
    error: Exception | None = None
    mine = 0
    try:
        result = action()
    except AnotherRankFailed as raised:  # in an exchange within the action, where that rank has failed
        error = raised
    except Exception as raised:
        error, mine = raised, world.world_size - world.rank  # the lowest failed rank has the highest number
    signal_number = 0 if stop is None else stop.signal_number  # a signal during the exchange counts for the next one
    signal_number, failed = world.max_(torch.tensor([signal_number, mine])).tolist()
    if error is not None and failed == mine:
        raise error
    if not failed:
        return result, signal_number
    raise AnotherRankFailed(f"rank {world.world_size - failed} has failed; see its output")


_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that this process gets when its parent ends."""


def stop_with_torchrun() -> None:
    """If torchrun started this rank, get SIGTERM when torchrun ends, also when it is killed.

    Otherwise the rank would go on, and a new start of the run would find its folder in use.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818  asked for, not an error
    """The run was stopped by a signal. It is saved and can be resumed."""

    def __init__(self, signal_number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + signal_number
        name = signal.Signals(signal_number).name
        self.where = f"stopped by {name} after step {step}, saved in {folder}"
        super().__init__(f"{self.where}; continue with --resume auto")


class StopSignals:
    """Turns SIGTERM, SIGHUP (a closed terminal) and Ctrl-C into a request to stop after the current step.

    A second Ctrl-C ends the process at once. Under nohup, SIGHUP stays ignored.

    Attributes:
        signal_number: the signal that came; 0: none.
        agreed: whether all ranks know of it, so that the current step is the last.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.agreed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

"""Collective errors and stop signals: an error or a signal on one rank stops all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from errors import ToldByAnother, UserError
from errors.refused import may_pass, of_machine
from train.distributed.interrupt import StopSignals
from train.distributed.world import World

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Run an action on all ranks. If it fails on one rank, it fails on all.

    Raises:
        UserError: the error of the lowest failed rank; on the other ranks it is a `ToldByAnother`. Errors of the
            machine, such as lack of memory, become a `UserError` too.
    """
    return _together(world, None, action)[0]


def require_same(world: World, what: str, mine: str, remedy: str) -> None:
    """Raise a `UserError` on all ranks if one of them describes its own `what` in other words than rank 0.

    Only the lowest rank reports it; on the other ranks it is a `ToldByAnother`.
    """
    everybody = world.gather_objects((mine, platform.node()))
    first, host = everybody[0]
    for rank, (other, other_host) in enumerate(everybody):
        if other != first:
            kind = UserError if world.is_main else ToldByAnother
            raise kind(
                f"the ranks have different {what}: rank 0 on {host} has {first}, rank {rank} on {other_host} has "
                f"{other}. {remedy}"
            )


class Together:
    """Exchanges before every step whether a rank failed or got a stop signal.

    This costs one message of a few bytes per step between the hosts, which does not wait for a GPU. With a single
    process there is none.

    Args:
        stop: this rank's signals; it then gets the signals of all ranks.
        check: raises errors that happened in other threads of this rank since the last step.
    """

    def __init__(self, world: World, stop: StopSignals, check: Callable[[], None]) -> None:
        self._world, self._stop, self._check = world, stop, check
        self._agreed = False

    @property
    def stopping(self) -> bool:
        """Whether the current step is the last, because a rank got a stop signal."""
        return self._agreed or (self._world.world_size == 1 and self._stop.signal_number != 0)

    def each(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches as long as all ranks have one. Errors of the batches and of `check` are raised as in
        `together`."""
        iterator = iter(batches)

        def take() -> T | None:
            self._check()
            return next(iterator, None)

        while True:
            batch, signal_number = _together(self._world, self._stop, take)
            if batch is None:
                return
            if signal_number:
                self._stop.signal_number = signal_number
                self._agreed = True
            yield batch


def _together(world: World, stop: StopSignals | None, action: Callable[[], T]) -> tuple[T, int]:
    """Result of the action on this rank, and the highest signal number of all ranks. Any rank's failure is raised."""
    error: UserError | None = None
    try:
        result = action()
    except UserError as wrong:
        error = wrong
    except Exception as refused:
        message = of_machine(refused)
        if message is None:
            raise
        error = UserError(message)
        error.__cause__ = refused  # tells whether it may pass
    mine = 0 if stop is None else stop.signal_number  # a signal during the exchange counts for the next one
    signal_number, failed = world.max_(torch.tensor([mine, int(error is not None)])).tolist()
    if not failed:
        return result, signal_number
    errors = world.gather_objects(None if error is None else (str(error), may_pass(error)))
    rank, (message, passing) = next((rank, told) for rank, told in enumerate(errors) if told is not None)
    if error is not None and world.rank == rank:
        raise error
    raise ToldByAnother(f"rank {rank}: {message}", may_pass=passing)

"""Collective errors and stop signals: an error or a signal on one rank stops all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from peclr_dali.errors import ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import is_transient, machine_error_line
from peclr_dali.train.distributed.interrupt import StopSignals
from peclr_dali.train.distributed.world import World

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Run an action on all ranks. If it fails on one rank, it fails on all.

    Raises:
        UserError: the error of the lowest failed rank; on the other ranks it is a `ReportedByAnotherRank`. Errors of
            the machine, such as lack of memory, become a `UserError` too.
    """
    return _together(world, None, action)[0]


def on_main(world: World, action: Callable[[], T]) -> T | None:
    """Run an action on rank 0, with None as the result on the others. An error is raised as in `together`."""
    return together(world, lambda: action() if world.is_main else None)


def steps_of_all_ranks(world: World, stop: StopSignals, check: Callable[[], None], batches: Iterable[T]) -> Iterator[T]:
    """Yield batches as long as all ranks have one. Errors of the batches and of `check` are raised as in `together`.

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
        batch, signal_number = _together(world, stop, take)
        if batch is None:
            return
        if signal_number:
            stop.signal_number, stop.agreed = signal_number, True
        yield batch


def _together(world: World, stop: StopSignals | None, action: Callable[[], T]) -> tuple[T, int]:
    """Result of the action on this rank, and the highest signal number of all ranks. Any rank's failure is raised."""
    error: UserError | None = None
    try:
        result = action()
    except UserError as wrong:
        error = wrong
    except Exception as refused:
        message = machine_error_line(refused)
        if message is None:
            raise
        error = UserError(message)
        error.__cause__ = refused  # says whether a restart may help
    mine = 0 if stop is None else stop.signal_number  # a signal during the exchange counts for the next one
    signal_number, failed = world.max_(torch.tensor([mine, int(error is not None)])).tolist()
    if not failed:
        return result, signal_number
    errors = world.gather_objects(None if error is None else (str(error), is_transient(error)))
    rank, (message, transient) = next((rank, found) for rank, found in enumerate(errors) if found is not None)
    if error is not None and world.rank == rank:
        raise error
    raise ReportedByAnotherRank(f"rank {rank}: {message}", transient=transient)

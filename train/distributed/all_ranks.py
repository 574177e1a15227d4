"""Collective errors and stop signals: an error or a signal on one rank stops all ranks after the same step."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from peclr_dali.errors import AnotherRankFailed, UserError, in_one_line
from peclr_dali.train.distributed.interrupt import StopSignals
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
    if not failed:
        return result, signal_number
    first = world.world_size - failed
    reasons = world.gather_objects(in_one_line(error, 1000))
    if error is not None and failed == mine:
        raise error
    raise AnotherRankFailed(f"rank {first} has failed: {reasons[first]}")

"""What ranks decide together: nobody goes on alone, and nobody waits for one who has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from errors import ToldByAnother, UserError
from errors.refused import of_machine
from train.distributed.interrupt import StopSignals
from train.distributed.world import World

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Do something on all ranks that may fail on some of them: it then fails on all.

    Raises:
        UserError: of the lowest rank that failed, on this rank if it is the one, else as `ToldByAnother`. What the
            machine refuses, such as a file or memory, is one, too.
    """
    return _together(world, None, action)[0]


class Together:
    """Before every step the ranks tell each other whether one cannot go on or was asked to stop.

    It takes one message of a few bytes between the hosts per step, which waits for no GPU; none with a single process.

    Args:
        stop: this rank's signals; all ranks' afterwards.
        check: what may have gone wrong on this rank since the last step, in another thread.
    """

    def __init__(self, world: World, stop: StopSignals, check: Callable[[], None]) -> None:
        self._world, self._stop, self._check = world, stop, check
        self._agreed = False

    @property
    def stopping(self) -> bool:
        """Whether the step at hand is the last, because some rank was asked to stop."""
        return self._agreed or (self._world.world_size == 1 and self._stop.signal_number != 0)

    def each(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, for as long as all ranks have one; errors of taking one and of the check as `together`."""
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
    """What the action gives on this rank, unless it fails on any, and the highest signal of all ranks."""
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
        error.__cause__ = refused
    mine = 0 if stop is None else stop.signal_number  # one that comes during the exchange counts for the next
    signal_number, failed = world.max_(torch.tensor([mine, int(error is not None)])).tolist()
    if not failed:
        return result, signal_number
    messages = world.gather_objects(None if error is None else str(error))
    first = next(rank for rank, said in enumerate(messages) if said is not None)
    if error is not None and world.rank == first:
        raise error
    raise ToldByAnother(f"rank {first}: {messages[first]}")

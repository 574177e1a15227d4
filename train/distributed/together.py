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
    result, error = _attempt(action)
    _, failed = _agree(world, 0, error)
    if failed:
        _raise_together(world, error)
    return result[0]


class Together:
    """Before every step the ranks tell each other whether one cannot go on or was asked to stop.

    It takes one message of a few bytes between the hosts per step, which waits for no GPU; none with a single process.

    Args:
        world: the ranks.
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
        """The batches, for as long as all ranks have one.

        Raises:
            UserError: as `together`, if taking the batch or the check fails on some rank.
        """
        iterator = iter(batches)

        def take() -> T | None:
            self._check()
            return next(iterator, None)

        while True:
            batch, error = _attempt(take)
            signal_number, failed = _agree(self._world, self._stop.signal_number, error)
            if failed:
                _raise_together(self._world, error)
            if batch[0] is None:
                return
            if signal_number:  # one that came to this rank during the exchange counts for the next
                self._stop.signal_number = signal_number
                self._agreed = True
            yield batch[0]


def _attempt(action: Callable[[], T]) -> tuple[list[T], UserError | None]:
    try:
        return [action()], None
    except UserError as error:
        return [], error
    except Exception as error:
        message = of_machine(error)
        if message is None:
            raise
        refused = UserError(message)
        refused.__cause__ = error
        return [], refused


def _agree(world: World, signal_number: int, error: UserError | None) -> tuple[int, bool]:
    """The highest signal of all ranks, and whether any has an error."""
    if world.world_size == 1:
        return signal_number, error is not None
    signal_number, failed = world.max_(torch.tensor([signal_number, int(error is not None)])).tolist()
    return signal_number, bool(failed)


def _raise_together(world: World, error: UserError | None) -> None:
    messages = world.gather_objects(None if error is None else str(error))
    first = next(rank for rank, message in enumerate(messages) if message is not None)
    if error is not None and world.rank == first:
        raise error
    raise ToldByAnother(f"rank {first}: {messages[first]}")

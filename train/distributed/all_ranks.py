"""Collective errors and stop signals: an error or a signal on one rank stops all ranks after the same step."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from peclr_dali.errors import AnotherRankFailed, UserError, in_one_line
from peclr_dali.train.distributed.interrupt import StopSignals
from peclr_dali.train.distributed.world import World


@contextmanager
def on_all_ranks(world: World, stop: StopSignals | None = None) -> Iterator[None]:
    """If the `with` block fails on one rank, it fails on all. Blocks may be nested.

    The ranks exchange a few bytes at the end of the block, without waiting for a GPU; a single process does not.

    Args:
        stop: this rank's stop signals; the ranks exchange them too, and each gets those of all.

    Raises:
        Exception: the error of this rank, on the lowest rank that failed.
        AnotherRankFailed: on all other ranks.
    """
    error: Exception | None = None
    mine = 0
    try:
        yield
    except AnotherRankFailed as raised:  # in an exchange within the block, where that rank has failed
        error = raised
    except Exception as raised:
        error, mine = raised, world.world_size - world.rank  # the lowest failed rank has the highest number
    signal_number = 0 if stop is None else stop.signal_number  # a signal during the exchange counts for the next one
    signal_number, failed = world.max_(torch.tensor([signal_number, mine])).tolist()
    if failed:
        first, reasons = world.world_size - failed, world.gather_objects(in_one_line(error, 1000))
        if error is not None and failed == mine:
            raise error
        raise AnotherRankFailed(f"rank {first} has failed: {reasons[first]}")
    if stop is not None and signal_number:
        stop.signal_number, stop.agreed = signal_number, True


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

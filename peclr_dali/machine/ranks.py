"""Reads the rank of this process and the number of ranks from torchrun's environment variables."""

from __future__ import annotations

import os
from typing import NamedTuple

from peclr_dali.errors import UserError


class Ranks(NamedTuple):
    """The rank of this process, and the number of ranks. The default is a run of one process.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: processes of the run.
        local_rank: rank among the processes of this machine.
        local_world_size: processes of the run on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def described_ranks(rank: int | None = None, world_size: int | None = None) -> Ranks:
    """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`; one process if they are not set.

    Args:
        rank: used instead of `RANK`.
        world_size: used instead of `WORLD_SIZE`. Give both or neither.

    Raises:
        UserError: a variable is not a number, or the numbers contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise UserError(f"rank = {rank} and world_size = {world_size}: expected both, or none, as under torchrun")
    found = [_from_environment(name.upper(), default) for name, default in Ranks._field_defaults.items()]
    if rank is not None and world_size is not None:
        found[:2] = rank, world_size
    ranks = Ranks(*found)
    where = " (RANK and WORLD_SIZE in the environment)" if rank is None else ""
    if not 0 <= ranks.rank < ranks.world_size or (ranks.world_size > 1 and rank is None and "RANK" not in os.environ):
        raise UserError(
            f"rank = {ranks.rank} and world_size = {ranks.world_size}{where}: expected a rank below the number of "
            "ranks, or neither of both. Start the processes with torchrun."
        )
    return ranks


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"{name} = {value!r} in the environment: expected a number, as torchrun sets it. Unset it.")
    return int(value)

"""The rank of this process, and the number of ranks."""

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
        UserError: the numbers contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise UserError(f"rank = {rank} and world_size = {world_size}: expected both, or none, as under torchrun")
    found = {name: os.environ.get(name.upper(), str(default)) for name, default in Ranks._field_defaults.items()}
    if wrong := [name for name, text in found.items() if not text.isdecimal() or ("size" in name and int(text) == 0)]:
        raise UserError(f"{wrong[0].upper()} = {found[wrong[0]]!r}: expected a number, as torchrun sets it")
    ranks = Ranks(*map(int, found.values()))
    if rank is not None and world_size is not None:
        ranks = ranks._replace(rank=rank, world_size=world_size)
    unnumbered = rank is None and ranks.world_size > 1 and "RANK" not in os.environ  # all would load the same
    if unnumbered or not 0 <= ranks.rank < ranks.world_size:
        where = " (RANK and WORLD_SIZE in the environment)" if rank is None else ""
        raise UserError(
            f"rank = {ranks.rank} and world_size = {ranks.world_size}{where}: expected both, and a rank below the "
            "number of ranks, or neither. Start the processes with torchrun."
        )
    return ranks

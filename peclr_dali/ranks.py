"""The rank of this process, and the number of ranks."""

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
        world_size: used instead of `WORLD_SIZE`.

    Raises:
        UserError: the numbers contradict each other.
    """
    found = {name: os.environ.get(name.upper(), str(default)) for name, default in Ranks._field_defaults.items()}
    for name, text in found.items():
        if not text.isdecimal() or ("size" in name and int(text) == 0):
            raise UserError(f"{name.upper()} = {text!r}: expected a number, as torchrun sets it")
    given = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    ranks = Ranks(**{name: int(text) for name, text in found.items()} | given)
    unnumbered = rank is None and "RANK" not in os.environ and ranks.world_size > 1  # all would load the same
    if unnumbered or not 0 <= ranks.rank < ranks.world_size:
        where = "" if given else " (RANK and WORLD_SIZE in the environment)"
        raise UserError(
            f"rank = {ranks.rank} and world_size = {ranks.world_size}{where}: expected both, and a rank below the "
            "number of ranks, or neither. Start the processes with torchrun."
        )
    return ranks

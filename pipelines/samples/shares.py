"""The part of a batch that each rank takes. The configuration is checked with it, so it imports nothing heavy."""

from numbers import Integral
from typing import Any

from peclr_dali.errors import UserError


def require_whole_micro_batches(batch: int, micro_batch: int, table: str = "train.") -> None:
    """Raise a `UserError` if a batch is not a multiple of the micro-batch; the message names both keys of `table`."""
    counts: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch}
    for key, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise UserError(f"{table}{key} = {count!r}: expected a whole number above 0")
    if batch % micro_batch:
        raise UserError(
            f"{table}batch = {batch} is not a multiple of {table}micro_batch = {micro_batch}: batch norm sees whole "
            "micro-batches, so change one of the two."
        )


def micro_batch_share(batch: int, micro_batch: int, rank: int, world_size: int, *, table: str = "train.") -> range:
    """The share of a global batch that a rank computes.

    A share is whole micro-batches of consecutive positions, as even as possible: the first ranks may have one more. The
    content of a micro-batch, and so batch norm, does not depend on rank or world size. Batches are counted in source
    images. `table` is the table of the two keys, for messages.

    Raises:
        UserError: the batch is not a multiple of the micro-batch, or there are fewer micro-batches than ranks.
    """
    require_whole_micro_batches(batch, micro_batch, table)
    micro_batches = batch // micro_batch
    if micro_batches < world_size:
        raise UserError(
            f"{table}batch = {batch} holds {micro_batches} micro-batches of {micro_batch} images, fewer than the "
            f"{world_size} ranks: start fewer processes, raise {table}batch, or set a smaller {table}micro_batch, "
            "which changes what batch norm sees."
        )
    each, more = divmod(micro_batches, world_size)
    start = rank * each + min(rank, more)
    return range(start * micro_batch, (start + each + (rank < more)) * micro_batch)

"""How long the ranks' exchanges take, for the benchmark of scaling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from train.distributed.world import World


def time_sums(world: World, sizes_bytes: Sequence[int], *, repeats: int = 9) -> list[float]:
    """Seconds of a sum over all ranks of so many bytes of float32, the median of some repeats, of the slowest rank.

    Args:
        world: at least two ranks.
        sizes_bytes: multiples of 4.
        repeats: of each size, after one that does not count.
    """
    medians = []
    for size in sizes_bytes:
        tensor = torch.zeros(size // 4, device=world.device)
        times = []
        for _ in range(repeats + 1):
            world.barrier()
            start = time.perf_counter()
            world.sum_(tensor)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[1:]))
    return world.max_(torch.tensor(medians, dtype=torch.float64)).tolist()

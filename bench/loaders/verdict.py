"""States in one sentence whether training is loader-bound, and which resource is the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from bench.measure import MeanInterval, Rate

Cost = Literal["reading", "decoding", "geometry", "colour", "handing over"]

_BUSY: Final = 0.8
"""Share of busy cores from which the processor counts as the limit."""

_REMEDY: Final[Mapping[Cost, str]] = {
    "reading": "fewer and larger files (packed shards), or a local disk",
    "decoding": "smaller source images, more cores, or a GPU that decodes",
    "geometry": "more cores, or a GPU that makes the views",
    "colour": "more cores, or a GPU that makes the views",
    "handing over": "larger batches (pipelines.batch, train.batch)",
}


class PageCache(NamedTuple):
    """Images/s of a pass over all files, start-up included, with the files in the page cache or dropped from it."""

    warm: MeanInterval
    cold: MeanInterval
    bytes_per_image: float


def costs_s(parts: Mapping[str, Rate]) -> dict[Cost, float]:
    """Processor seconds per image of each part of `bench.loaders.parts`."""
    cost = {name: rate.cpu_s_per_image for name, rate in parts.items()}
    decode = cost.get("decode only", 0.0)  # pixels that are kept are not decoded
    if "views only" in cost:
        geometry, views = cost["geometry only"], cost["views only"]
    else:  # the graph's parts begin with the decoder
        geometry, views = cost["decode + geometry"] - decode, cost["decode + views"] - decode
    return {
        "reading": cost["read only"],
        "decoding": decode,
        "geometry": max(geometry, 0.0),
        "colour": max(views - geometry, 0.0),
        "handing over": cost["hand-over only"],
    }


def verdict(
    ours: Rate, cores: int, parts: Mapping[str, Rate], *, step: Rate | None = None, cache: PageCache | None = None
) -> str:
    """One sentence: whether training is loader-bound, the limiting resource, what to change.

    `ours` is the rate of our loader on `cores` cores. `parts` are the rates of its parts, each measured alone. `step`
    is the rate of the training step on batches in memory.
    """
    limit = _limit(ours, cores, parts, cache)
    made = f"the loader makes {ours.mean:.0f} images/s"
    if step is None:
        return f"{made[0].upper()}{made[1:]}; {limit}. With --step, the verdict says whether training waits."
    if ours.interval[0] >= step.interval[1]:
        return (
            f"Training is not loader-bound: with batches in memory it takes {step.mean:.0f} images/s, and {made}, "
            f"{ours.mean / step.mean:.1f} times that; only a faster model or GPU would speed it up."
        )
    if ours.interval[1] > step.interval[0]:
        return (
            f"Whether training is loader-bound cannot be told: with batches in memory it takes {step.mean:.0f} "
            f"images/s, and {made}; the intervals overlap. More --repeats make them narrower; {limit}."
        )
    return (
        f"Training is loader-bound: with batches in memory it takes {step.mean:.0f} images/s, and {made}, "
        f"{ours.mean / step.mean:.2f} of that; {limit}."
    )


def _limit(ours: Rate, cores: int, parts: Mapping[str, Rate], cache: PageCache | None) -> str:
    # Slower by a factor, the intervals not overlapping.
    if cache is not None and cache.cold.high < cache.warm.low and cache.cold.mean < 0.5 * cache.warm.mean:
        return (
            f"from a cold page cache, storage limits it ({cache.cold.mean:.0f} against {cache.warm.mean:.0f} "
            f"images/s, {cache.cold.mean * cache.bytes_per_image / 2**20:.0f} MiB/s): change to a local or faster "
            f"disk, or to packed shards"
        )
    costs = costs_s(parts)
    part = max(costs, key=lambda name: costs[name])
    share = costs[part] / sum(costs.values())
    busy = ours.cores_busy / cores
    if busy >= _BUSY:
        return (
            f"the processor limits it ({busy:.0%} of {cores} cores busy), and {part} takes {share:.0%} of its time: "
            f"change to {_REMEDY[part]}"
        )
    slowest = min(parts, key=lambda name: parts[name].mean)
    return (
        f"no core limits it ({busy:.0%} of {cores} busy) but waiting, its slowest part being '{slowest}' at "
        f"{parts[slowest].mean:.0f} images/s: raise pipelines.threads, pipelines.prefetch or pipelines.batch "
        f"(--tune finds them)"
    )

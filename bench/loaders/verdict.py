"""States in one sentence what limits the loader, and what to change."""

from __future__ import annotations

from typing import Final

from bench.rows import Row

_BUSY: Final = 0.8
"""Share of busy cores from which the processor counts as the limit."""

_REMEDY: Final = {
    "reading": "fewer and larger files (packed shards), or a local disk",
    "decoding": "smaller source images, more cores, or a GPU that decodes",
    "making views": "more cores, or a GPU that makes the views",
}


def verdict(row: Row) -> str:
    """What limits the loader, from a row of `bench-loader`: the processor, and what it does most, or waiting."""
    ours = row["loaders"][0]
    cores = row["settings"].get("cores", row["machine"]["cores"])
    made, busy = f"The loader makes {ours['images_per_s']:.0f} images/s", ours["cores_busy"] / cores
    if busy < _BUSY:
        slowest = min(row["stages"], key=lambda one: float(one["images_per_s"]))
        return (
            f"{made}; no core limits it ({busy:.0%} of {cores} busy) but waiting; the part '{slowest['name']}' alone "
            f"makes {slowest['images_per_s']:.0f}: raise pipelines.threads, pipelines.prefetch or pipelines.batch."
        )
    parts_ms = {one["name"]: float(one["cpu_ms_per_image"]) for one in row["stages"]}
    read_ms, decode_ms = parts_ms["read only"], parts_ms["decode only"]
    views_ms = max(ours["cpu_ms_per_image"] - read_ms - decode_ms, 0.0)
    costs = {"reading": read_ms, "decoding": decode_ms, "making views": views_ms}
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{made}; the processor limits it ({busy:.0%} of {cores} cores busy), and {most} takes "
        f"{costs[most] / sum(costs.values()):.0%} of its time: change to {_REMEDY[most]}."
    )

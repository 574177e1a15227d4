"""How long a run waits before its first batch: reading the index, then the loader's start, from a cold page cache.

The kernel's memory of names and folders stays, since only an administrator may drop it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bench.hardware import describe_machine
from bench.loader import Settings, check, drop_from_page_cache, our_batches
from bench.measure import limited_to_cores
from errors import UserError
from pipelines.sources import load_index
from train.config.pretraining import Config
from train.config.tables import to_dict


@dataclass(frozen=True)
class FirstBatch:
    """What was waited for.

    Attributes:
        images: in the index.
        index_s: seconds to read the index.
        batch_s: seconds from building the loader to its first batch, with what happens once in a process.
    """

    images: int
    index_s: float
    batch_s: float


def first_batch(config: Config, settings: Settings) -> FirstBatch:
    """Read the index and make one batch, in a process that has made none before.

    Raises:
        UserError: the data cannot be used, or has fewer images than a batch.
    """
    known = load_index(config.data)
    check(known, settings)
    if known.store is None:
        files = list({known.path(sample).stat().st_ino: known.path(sample) for sample in range(len(known))}.values())
    elif known.sources:
        raise UserError("--first-batch: of several sources, packed ones cannot be dropped from the cache. Take one.")
    else:
        files = list(known.root.glob("*.tar"))
    drop_from_page_cache([*files, *known.root.glob("*.json")])
    with limited_to_cores(settings.cores):
        began = time.perf_counter()
        index = load_index(config.data)
        read = time.perf_counter()
        batches = our_batches(index, config, settings.batch)
        next(batches)
        made = time.perf_counter()
        batches.close()
    return FirstBatch(len(index), read - began, made - read)


def as_json(found: FirstBatch, config: Config, settings: Settings) -> dict[str, Any]:
    """A row of bench/results/."""
    tables = to_dict(config)
    return {
        "bench": "first_batch",
        "machine": describe_machine(),
        "settings": {"cores": settings.cores, "batch": settings.batch},
        "config": {name: tables[name] for name in ("data", "geometry", "colour", "appearance", "pipelines")},
        "images": found.images,
        "index_s": round(found.index_s, 2),
        "first_batch_s": round(found.batch_s, 2),
    }

"""The `pack` command: the data of a configuration as shards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from errors import UserError
from machine.cores import available_cores
from pipelines.config import each_source
from pipelines.sources import load_index
from pipelines.sources.pack import Packed, Progress, pack
from train.config.pretraining import Config


def pack_data(config: Config, out: Path, *, per_shard: int, workers: int | None, progress: Progress) -> Packed:
    """Pack the one source of a configuration.

    Raises:
        UserError: there are several sources, or the data or `out` cannot be used.
    """
    sources = each_source(config.data)
    if len(sources) > 1:
        raise UserError(f"{len(sources)} tables [[data]]: shards hold one source. Pack each by itself.")
    # Without the margin, which belongs to the run that reads the shards.
    index = load_index(dataclasses.replace(sources[0], box_margin=1.0))
    return pack(index, out, per_shard=per_shard, workers=workers or available_cores(), progress=progress)

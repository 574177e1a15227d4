"""Measures how long a run waits for its first batch: reading the index and starting the loader, from a cold page cache.

The kernel's cache of file names and folders stays, since only an administrator can empty it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.loaders.ours import CPU, LoaderSettings, drop_from_page_cache, load_enough, our_batches
from bench.measure import limited_to_cores
from bench.rows import data_tables, describe_machine
from errors import UserError
from pipelines.config import each_source, is_address
from pipelines.sources import load_index
from train.config.pretraining import Config


def first_batch(config: Config, settings: LoaderSettings, device: torch.device = CPU) -> dict[str, Any]:
    """Read the index and make the first batch of this process.

    Returns:
        A row of bench/results/. "index_s": seconds to read the index. "first_batch_s": seconds from building the loader
        to its first batch, including the work that a process does only once.
    """
    if addresses := [one.root for one in each_source(config.data) if is_address(one.root)]:
        raise UserError(
            f"--first-batch: data.root = {addresses[0]} is not on this machine, whose page cache is dropped. Copy the "
            "data to a folder."
        )
    known = load_enough(config, settings)
    if known.store is None and known.pixels is None:
        files = list({known.path(sample).stat().st_ino: known.path(sample) for sample in range(len(known))}.values())
    elif known.sources:
        raise UserError(
            "--first-batch: with several sources, packed data cannot be dropped from the page cache. Use one source."
        )
    else:
        folders = {known.root, *(Path(one.root) for one in each_source(config.data))}  # the shards', the index's
        files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files += known.root.glob("*.json")
    del known  # a page that is mapped into memory stays in the cache
    drop_from_page_cache(files)
    with limited_to_cores(settings.cores):
        began = time.perf_counter()
        index = load_index(config.data)
        read = time.perf_counter()
        batches = our_batches(index, config, settings.batch, device)
        next(batches)
        made = time.perf_counter()
        batches.close()
    return {
        "bench": "first_batch",
        "machine": describe_machine(),
        "device": str(device),
        "settings": {"cores": settings.cores, "batch": settings.batch},
        "config": data_tables(config),
        "images": len(index),
        "index_s": round(read - began, 2),
        "first_batch_s": round(made - read, 2),
    }


def summary(row: Mapping[str, Any]) -> str:
    """The row in one sentence."""
    return (
        f"index of {row['images']} images: {row['index_s']:.2f} s; first batch of {row['settings']['batch']}: "
        f"{row['first_batch_s']:.2f} s more"
    )

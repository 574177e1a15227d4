"""`bench-loader`: our loader, its parts and other loaders, measured in one run on the same cores."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bench.loaders.ours import (
    LoaderSettings,
    drop_from_page_cache,
    load_enough,
    our_batches,
    require_sound,
    thread_counts,
)
from bench.loaders.parts import LoaderPart, parts_of_loader
from bench.loaders.peers import installed_peers
from bench.loaders.verdict import PageCache, verdict
from bench.measure import Progress, Rate, Start, interval_of_mean, limited_to_cores, measure_in_rounds, no_progress
from bench.rows import data_tables, describe_machine
from errors import UserError
from pipelines.config import DataConfig, each_source
from pipelines.samples.index import Index
from pipelines.samples.store import Traffic
from train.config.pretraining import Config

log = logging.getLogger(__name__)

Row = dict[str, Any]


def conditions(config: Config, settings: LoaderSettings, sources: str) -> Row:
    """The part of a row that is known before the measurement. `sources`: "small" or "large" images."""
    return {
        "machine": describe_machine(),
        "settings": asdict(settings),
        "sources": sources,
        "config": data_tables(config),
    }


def compare_loaders(
    config: Config,
    settings: LoaderSettings,
    *,
    device: torch.device,
    sources: str = "small",
    step: Rate | None = None,
    progress: Progress = no_progress,
) -> Row:
    """Measure our loader as configured, its parts, and every installed peer in rounds.

    Args:
        device: device of our loader's batches.
        sources: see `conditions`.
        step: rate of the training step alone, in images/s, for the verdict.

    Returns:
        A row of bench/results/. "loaders" begins with ours; "stages" are its parts, each alone; "threads" is ours with
        other numbers of threads.
    """
    index = load_enough(config, settings)
    network = _Network(index)
    require_sound(index)  # reading also fills the page cache, for all loaders alike
    first_pass = network.since()
    paths = [] if index.store is not None else [index.path(sample) for sample in range(len(index))]
    if index.store is not None:
        log.info("packed data: other loaders and passes from a cold cache are left out, since they need single files")

    measured = {
        "loaders": [
            LoaderPart(
                "this loader",
                f"as configured, backend {config.pipelines.backend}",
                _start_ours(index, config, settings, device),
                2,
            ),
            *_on_pixels(config, settings, device),
            *_other_loaders(paths, index, settings),
        ],
        "stages": parts_of_loader(index, config, settings.batch, device),
        "threads": _with_other_threads(index, config, settings, device),
    }
    everything = [one for group in measured.values() for one in group]
    gc.freeze()  # as pre-training does
    with limited_to_cores(settings.cores):
        rates = measure_in_rounds([one.start for one in everything], settings, progress)
        cache = _passes(everything[0].start, paths, settings) if settings.passes and paths else None
    found = dict(zip(everything, rates, strict=True))
    entries = {group: [_entry(one, found[one], rates[0]) for one in parts] for group, parts in measured.items()}
    measured_rounds = network.since()
    parts = {one.name: found[one] for one in measured["stages"] if one.as_configured}
    return {
        "bench": "loader",
        **conditions(config, settings, sources),
        "device": str(device),
        "loaders": entries["loaders"],
        "stages": entries["stages"],
        "threads": dict(zip(map(str, thread_counts(settings.cores)), entries["threads"], strict=True)),
        "page_cache": None if cache is None else _passes_in_row(cache),
        "network": None if first_pass is None else {"first_pass": first_pass, "rounds": measured_rounds},
        "step_images_per_s": None if step is None else round(step.mean, 1),
        "verdict": verdict(rates[0], settings.cores, parts, step=step, cache=cache),
    }


class _Network:
    """What the data's store has read from the network and from its cache."""

    def __init__(self, index: Index) -> None:
        self._store = index.store
        self._before, self._began = Traffic(), time.perf_counter()

    def since(self) -> Row | None:
        """Figures since the last call; None for data without a cache."""
        traffic = None if self._store is None else self._store.traffic()
        if traffic is None:
            return None
        now = time.perf_counter()
        found, seconds = traffic - self._before, now - self._began
        self._before, self._began = traffic, now
        return {
            "images": found.images,
            "hit_rate": round(found.hits / max(found.images, 1), 4),
            "read_directly": found.direct,
            "mb": round(found.bytes / 1e6, 2),
            "mb_per_s": round(found.bytes / 1e6 / max(seconds, 1e-9), 2),
        }


def _start_ours(index: Index, config: Config, settings: LoaderSettings, device: torch.device) -> Start:
    return lambda: our_batches(index, config, settings.batch, device)


def _other_loaders(paths: Sequence[Path], index: Index, settings: LoaderSettings) -> list[LoaderPart]:
    """The installed peers that the settings ask for. Empty for packed data, which has no paths."""
    peers = installed_peers() if settings.peers and paths else {}
    return [
        LoaderPart(
            name,
            peer.description,
            partial(peer.start, paths, index.box_px, settings.cores, settings.batch),
            peer.views,
        )
        for name, peer in peers.items()
        if not settings.only_peers or name in settings.only_peers
    ]


def _with_other_threads(
    index: Index, config: Config, settings: LoaderSettings, device: torch.device
) -> list[LoaderPart]:
    """Our loader with each of `thread_counts`."""
    return [
        LoaderPart(
            f"this loader, {count} thread{'s' if count > 1 else ''}",
            f"pipelines.threads = {count}",
            _start_ours(index, replace(config, pipelines=replace(config.pipelines, threads=count)), settings, device),
            2,
        )
        for count in thread_counts(settings.cores)
    ]


def _on_pixels(config: Config, settings: LoaderSettings, device: torch.device) -> list[LoaderPart]:
    """Our loader on the same images, packed as decoded pixels. Empty if no such folder is given."""
    if settings.pixels is None:
        return []
    sources = each_source(config.data)
    if len(sources) > 1:
        raise UserError("--pixels is compared with one source, and data has several: leave it out, or name one source")
    data = DataConfig("shards", settings.pixels, box_margin=sources[0].box_margin)
    index = load_enough(replace(config, data=data), settings)
    what = "the same views of pixels that were packed: nothing is read or decoded"
    return [LoaderPart("this loader, pixels kept", what, _start_ours(index, config, settings, device), 2)]


def _entry(one: LoaderPart, rate: Rate, ours: Rate) -> Row:
    return {
        "name": one.name,
        "description": one.description,
        "images_per_s": round(rate.mean, 1),
        "interval": _rounded(rate.interval),
        "repeats": _rounded(rate.images_per_s),
        "views_per_s": round(rate.mean * one.views, 1),
        "cpu_ms_per_image": round(rate.cpu_s_per_image * 1e3, 3),
        "cores_busy": round(rate.cores_busy, 2),
        "memory_mib": round(rate.memory_mib),
        "images": rate.images,
        "ours_is": [round(edge, 3) for edge in ours.over(rate)],
    }


def _passes_in_row(cache: PageCache) -> Row:
    return {
        "warm": _rounded(cache.warm),
        "cold": _rounded(cache.cold),
        "bytes_per_image": round(cache.bytes_per_image),
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


def _passes(start: Start, paths: Sequence[Path], settings: LoaderSettings) -> PageCache:
    """Alternate passes over all files from a warm and from a cold page cache; both include the start-up."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    batches = len(paths) // settings.batch
    for _ in range(settings.passes):
        for cold in (False, True):
            if cold:
                drop_from_page_cache(paths)
            else:
                for path in paths:
                    path.read_bytes()
            began = time.perf_counter()
            making = start()
            images = sum(islice(making, batches))
            rates[cold].append(images / (time.perf_counter() - began))
            if isinstance(making, Generator):
                making.close()
    size = sum(path.stat().st_size for path in paths) / len(paths)
    return PageCache(interval_of_mean(rates[False]), interval_of_mean(rates[True]), size)

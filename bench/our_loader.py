"""Our loader as the benchmarks run it."""

from __future__ import annotations

from collections.abc import Generator

import torch

from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order
from peclr_dali.train.config.pretraining import Config


def make_endless_loader(index: Index, config: Config, batch: int, device: torch.device) -> Loader:
    """Our loader as configured, for one rank. It does not end."""
    schedule = Schedule(build_order(index, batch=batch, seed=config.run.seed), RankSlice(batch, 0, batch))
    return Loader(index, schedule, config.pipelines, config.augmentation, device=device)


def our_batches(index: Index, config: Config, batch: int, device: torch.device) -> Generator[int]:
    """Load batches without end and yield their numbers of images. Closing the generator closes the loader."""
    with make_endless_loader(index, config, batch, device) as loader:
        for made in loader:
            if device.type == "cuda":
                made.to(device)
                torch.cuda.current_stream(device).synchronize()  # a batch counts when it has arrived
            yield loader.images * len(made)


def where_pixels_are_made(settings: Settings) -> dict[str, str]:
    """For a row: the values of `pipelines.decoder` and `pipelines.views` that were chosen."""
    return {"decoder": settings.decoder, "views": settings.views}


def name_of(device: torch.device) -> str:
    """The GPU's name, or "none" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"

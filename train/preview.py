"""Draws the views that a configuration makes."""

from pathlib import Path

import torch

from peclr_dali.pipelines.loader.loader import build_loader
from peclr_dali.pipelines.samples.order import Schedule, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.writing import require_ending


def preview(config: Config, out: Path, *, samples: int) -> None:
    """Draw the views of the first samples of a run, on the CPU, to a .png or .jpg."""
    require_ending(out, ".png", ".jpg")
    index = load_index(config.data)
    count = min(samples, len(index))
    batch = max(count, min(config.train.batch, len(index)))  # the run's, where the data fills it
    order = build_order(index, batch=batch, seed=config.run.seed)
    cpu = torch.device("cpu")
    schedule = Schedule(order, batch, range(count), last_step=1)
    with build_loader(index, schedule, config.pipelines, config.augmentation, device=cpu) as loader:
        save_views(out, next(iter(loader)), index, samples=count)

"""Draws the views that a configuration makes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.writing import refuse_inputs


def preview(config: Config, out: Path, *, samples: int) -> None:
    """Draw the views of the first samples of a run, on the CPU."""
    if out.suffix.lower() not in (".png", ".jpg"):
        raise UserError(f"{out}: expected a name that ends in .png or .jpg")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder. Make it first")
    index = load_index(config.data)
    if index.store is None:
        names = (out.name, Path(os.path.realpath(out)).name)  # a link replaces what it points to
        same_name = (row for row, path in enumerate(index.paths) if path.endswith(names))
        refuse_inputs(out, map(index.path, same_name))
    count = min(samples, len(index))
    batch = max(count, min(config.train.batch, len(index)))  # the run's, where the data fills it
    order = build_order(index, batch=batch, seed=config.run.seed)
    cpu = torch.device("cpu")
    schedule = Schedule(order, RankSlice(batch, 0, count), last_step=1)
    with Loader(index, schedule, config.pipelines, config.augmentation, device=cpu) as loader:
        save_views(out, next(iter(loader)), index, samples=count)

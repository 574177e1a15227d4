"""Pre-trains pose encoders on unlabelled images: PeCLR on NVIDIA DALI.

The names below are for training loops of your own; docs/library.md shows them at work. They are imported when they are
used, since the commands and the configuration need neither torch nor DALI.
"""

from __future__ import annotations

import getpass
import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peclr_dali.errors import UserError
    from peclr_dali.models.equivariance import undo_view
    from peclr_dali.models.nt_xent import AnchorLoss, NTXent
    from peclr_dali.pipelines.batch import Batch, View
    from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
    from peclr_dali.pipelines.loader.epoch_loader import EpochLoader, make_loader
    from peclr_dali.pipelines.samples.index import Index
    from peclr_dali.pipelines.views.augmentation import AppearanceConfig, ColourConfig, GeometryConfig
    from peclr_dali.train.distributed.world import World, described_world, joined
    from peclr_dali.train.steps.embed import keypoints_of_pairs
    from peclr_dali.train.steps.exact import ExactStep
    from peclr_dali.train.steps.optim import Lars

__version__ = "0.2.0"

try:
    getpass.getuser()
except (KeyError, OSError):  # a user id without a name, as in `docker run --user`: torch asks for one
    os.environ["USER"] = str(os.getuid())

__all__ = [
    "AnchorLoss", "AppearanceConfig", "Batch", "ColourConfig", "DataConfig", "EpochLoader", "ExactStep",
    "GeometryConfig", "Index", "Lars", "NTXent", "PipelinesConfig", "UserError", "View", "World", "described_world",
    "joined", "keypoints_of_pairs", "make_loader", "undo_view",
]  # fmt: skip

_FOLDERS = {
    "errors": ("UserError",),
    "models.equivariance": ("undo_view",),
    "models.nt_xent": ("AnchorLoss", "NTXent"),
    "pipelines.batch": ("Batch", "View"),
    "pipelines.config": ("DataConfig", "PipelinesConfig"),
    "pipelines.loader.epoch_loader": ("EpochLoader", "make_loader"),
    "pipelines.samples.index": ("Index",),
    "pipelines.views.augmentation": ("AppearanceConfig", "ColourConfig", "GeometryConfig"),
    "train.distributed.world": ("World", "described_world", "joined"),
    "train.steps.embed": ("keypoints_of_pairs",),
    "train.steps.exact": ("ExactStep",),
    "train.steps.optim": ("Lars",),
}


def __getattr__(name: str) -> object:
    for module, names in _FOLDERS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

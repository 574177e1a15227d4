"""Makes batches of augmented views with their matrices from images on disk; see `make_loader` and docs/library.md.

Names are imported lazily: the configuration needs neither torch nor DALI.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peclr_dali.pipelines.batch import Batch as Batch
    from peclr_dali.pipelines.batch import View as View
    from peclr_dali.pipelines.config import DataConfig as DataConfig
    from peclr_dali.pipelines.config import PipelinesConfig as PipelinesConfig
    from peclr_dali.pipelines.loader.epoch_loader import EpochLoader as EpochLoader
    from peclr_dali.pipelines.loader.epoch_loader import make_loader as make_loader
    from peclr_dali.pipelines.views.augmentation import AppearanceConfig as AppearanceConfig
    from peclr_dali.pipelines.views.augmentation import ColourConfig as ColourConfig
    from peclr_dali.pipelines.views.augmentation import GeometryConfig as GeometryConfig

_MODULES = {
    "Batch": "batch",
    "View": "batch",
    "DataConfig": "config",
    "PipelinesConfig": "config",
    "EpochLoader": "loader.epoch_loader",
    "make_loader": "loader.epoch_loader",
    "AppearanceConfig": "views.augmentation",
    "ColourConfig": "views.augmentation",
    "GeometryConfig": "views.augmentation",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

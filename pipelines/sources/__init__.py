"""Dataset layouts: one file each, all giving an `Index`. A new one needs its file and one line in `load_index`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from pipelines.index import Index, join
from pipelines.sources.folder import load_folder
from pipelines.sources.freihand import load_freihand


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DataConfig:
    """Which images, and which square of each is the canonical view.

    Attributes:
        source: layout of the files: "freihand" or "folder" (any tree of JPEG and PNG files).
        root: the dataset's folder.
        part: FreiHAND's part.
        split: 90/10 by pose of FreiHAND's training part.
        versions: FreiHAND's background versions.
        box: FreiHAND: "center" (label-free), "joints" (ground truth, as in the authors' code) or a CSV or JSON file of
            boxes. A folder: a file of boxes, or "center" for the square around the whole image.
        center_frac: FreiHAND: side of the "center" box over the image's shorter side.
        box_margin: the canonical square is the box times this. The whole image takes no margin.
        weight: of several sources, this one's share of every batch is its weight over the sum of all weights.
    """

    source: Literal["freihand", "folder"] = "freihand"
    root: str = ".data/hands"
    part: Literal["training", "evaluation"] = "training"
    split: Literal["all", "train", "val"] = "all"
    versions: tuple[Literal["gs", "hom", "sample", "auto"], ...] = ("gs", "hom", "sample", "auto")
    box: str = "center"
    center_frac: Annotated[float, Field(gt=0, le=1)] = 0.6
    box_margin: Annotated[float, Field(gt=0)] = 1.5
    weight: Annotated[float, Field(gt=0)] = 1.0


def load_index(config: DataConfig | Sequence[DataConfig]) -> Index:
    """Read the table of samples, boxes with their margin; several sources become one table, one after the other.

    Raises:
        UserError: a folder or file is missing, empty or does not fit the layout.
    """
    if isinstance(config, DataConfig):
        return _load(config)
    return join([_load(one) for one in config], [one.weight for one in config])


def _load(config: DataConfig) -> Index:
    root = Path(config.root)
    if config.source == "folder":
        index = load_folder(root, boxes=None if config.box == "center" else Path(config.box))
    else:
        index = load_freihand(
            root,
            part=config.part,
            split=config.split,
            versions=config.versions,
            box=config.box,
            center_frac=config.center_frac,
        )
    box_px = index.box_px.copy()
    box_px[:, 2] *= config.box_margin
    return dataclasses.replace(index, box_px=box_px)

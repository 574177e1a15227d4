"""Dataset layouts. Each has a file with a function that returns an `Index`, and an entry here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from errors import UserError
from parsing import paths_in_one_line
from pipelines.config import DataConfig, each_source
from pipelines.samples.bad_list import rows_not_listed
from pipelines.samples.box_check import check_boxes
from pipelines.samples.index import Index, join
from pipelines.sources.coco import load_coco
from pipelines.sources.dexter_object import load_dexter_object
from pipelines.sources.folder import load_folder
from pipelines.sources.freihand import load_freihand
from pipelines.sources.ho3d import load_ho3d
from pipelines.sources.shards import load_shards
from pipelines.sources.subsets import in_fraction, rows_of_split
from pipelines.sources.youtube3d import load_youtube3d

_OWN_BOXES: Final = {
    "coco": "COCO's annotations hold the boxes",
    "shards": "shards hold the boxes that they were packed with",
    "youtube3d": "YouTube3DHands has its own boxes, one for each hand of a frame",
}


def load_index(config: DataConfig | Sequence[DataConfig], *, verify: bool = False) -> Index:
    """Read the index of one or several sources, with the margin applied to the boxes. Several sources are joined.

    Args:
        config: one source, or several.
        verify: for shards, compare the checksum of each sample when it is read.

    Raises:
        UserError: a folder or file is missing, empty or does not fit the layout.
    """
    sources = each_source(config)
    return join([_load(one, verify) for one in sources], [one.weight for one in sources])


def _load(config: DataConfig, verify: bool) -> Index:
    with paths_in_one_line(Path(config.root)):
        index = _load_source(config, Path(config.root), verify)
        check_boxes(index)
        left = None if config.bad_list is None else rows_not_listed(index, Path(config.bad_list))
    if config.label_fraction < 1:
        group = np.arange(len(index)) if index.group is None else index.group
        chosen = np.flatnonzero(in_fraction(group, config.label_fraction, seed=config.label_seed))
        left = chosen if left is None else np.intersect1d(chosen, left)
    if left is not None and len(left) < len(index):
        index = index.select(left)
    box_px = index.box_px.copy()
    box_px[:, 2] *= config.box_margin
    return dataclasses.replace(index, box_px=box_px)


def _load_source(config: DataConfig, root: Path, verify: bool) -> Index:
    boxes = None if config.box in ("center", "joints") else Path(config.box)
    if boxes is not None and config.source in _OWN_BOXES:
        raise UserError(f"data.box = {config.box!r}: {_OWN_BOXES[config.source]}. Leave it out.")
    if config.source == "shards":
        return _load_shards(config, root, verify)
    if config.shuffle_shards is not None:
        raise UserError(
            f"data.shuffle_shards = {config.shuffle_shards}: data.source is {config.source!r}, which has no shards. "
            "Leave it out, or pack the data first."
        )
    if config.source == "coco":
        return load_coco(root, split=config.split, annotations=config.annotations)
    if config.source == "folder":
        return load_folder(root, boxes=None if config.box == "center" else Path(config.box))
    if config.source == "youtube3d":
        regressor = None if config.regressor is None else Path(config.regressor)
        return load_youtube3d(root, part=_youtube3d_part(config), regressor=regressor)
    if config.source == "ho3d":
        return load_ho3d(root, part=config.part, split=config.split, boxes=boxes)
    if config.source == "dexter_object":
        if config.split != "all":
            raise UserError(f'data.split = {config.split!r}: Dexter+Object is not split. Use "all".')
        return load_dexter_object(root, boxes=boxes)
    return load_freihand(
        root,
        part=config.part,
        split=config.split,
        versions=config.versions,
        box=config.box,
        center_frac=config.center_frac,
    )


def _load_shards(config: DataConfig, root: Path, verify: bool) -> Index:
    """Packed data; what was chosen in packing it cannot be chosen again."""
    for key in ("part", "versions"):
        chosen = getattr(config, key)
        if chosen != getattr(DataConfig, key):
            raise UserError(f"data.{key} = {chosen!r}: shards hold what was packed. Leave it out.")
    index = load_shards(root, window=config.shuffle_shards, verify=verify)
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the shards of {root} do not say which of their images belong together, so "
            'they cannot be split. Use "all", or pack the splits apart.'
        )
    return index.select(rows_of_split(np.asarray(index.group), config.split))


def _youtube3d_part(config: DataConfig) -> Literal["train", "val", "test"]:
    if config.part == "training":
        return "val" if config.split == "val" else "train"
    if config.split != "all":
        raise UserError(f'data.split = {config.split!r}: YouTube3DHands\' test part is not split. Use "all".')
    return "test"

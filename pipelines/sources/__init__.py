"""Dataset layouts. Each has a file with a function that returns an `Index`, and an entry in `SOURCES`."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import SOURCES, DataConfig, refuse_address
from peclr_dali.pipelines.samples.box_check import check_boxes, check_cameras, check_keypoints
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.join import join
from peclr_dali.pipelines.samples.subsets import in_fraction, rows_not_listed
from peclr_dali.pipelines.sources.pairs import partners_of

_ONE_SIZE = ("freihand", "ho3d", "dexter_object")
"""Layouts with cameras whose images have one size. Those of others may be crops of a picture."""


def load_index(config: DataConfig | Sequence[DataConfig]) -> Index:
    """Read the index of one or several sources, with the margin applied to the boxes. Several sources are joined.

    Raises:
        UserError: a folder or file is missing, empty or does not fit the layout.
    """
    sources = [config] if isinstance(config, DataConfig) else config
    return join([_load(one) for one in sources], [one.weight for one in sources])


def _load(config: DataConfig) -> Index:
    refuse_address(config)
    try:
        index: Index = pkgutil.resolve_name(SOURCES[config.source])(config)
    except OSError as error:
        raise UserError(f"{error.filename or config.root}: {error.strerror or error}. Check the path") from error
    if not len(index):
        raise UserError(
            f"{config.root}: data.split = {config.split!r} has no image of a usable hand; a tenth of few groups is "
            'none. Mend the data, set data.split = "all", or use a larger set.'
        )
    sampled = check_boxes(index)
    if config.source in _ONE_SIZE:
        check_cameras(index, *sampled)
    check_keypoints(index)
    left = None
    if config.bad_list is not None:
        left = rows_not_listed(index, Path(config.bad_list))
    if config.label_fraction < 1:
        chosen = np.flatnonzero(in_fraction(index.groups, config.label_fraction, seed=config.label_seed))
        left = chosen if left is None else np.intersect1d(chosen, left)
    if left is not None and len(left) < len(index):
        index = index.select(left)
    box_px = index.box_px.copy()
    box_px[:, 2] *= config.box_margin
    return dataclasses.replace(index, box_px=box_px, partners=partners_of(index, config))

"""The `mine` command: writes a table of pairs of similar hands, and a picture of some of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig, each_source
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.partners import of_pairs
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.pairs import COLUMNS, numbered
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.data.similar import Floats, distances, most_similar, principal_components, shapes_of
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import canonical_loader
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.writing import refuse_existing, write_text

SHOWN: Final = 24
"""Pairs in the picture."""


@dataclass(frozen=True)
class Mined:
    """What was written.

    Attributes:
        distance: (P,) of the pairs, see `similar.distances`.
        hands: hands that have a pair.
        groups: groups that the hands are of.
        left_out: hands without keypoints, or with all of them at one place.
        found: see `Similar.found`.
    """

    distance: Floats
    hands: int
    groups: int
    left_out: int
    found: float


def mine(
    config: Config,
    out: Path,
    picture: Path,
    *,
    count: int,
    group: Literal["folder", "index"],
    upright: bool,
    progress: Callable[[int, int], None],
) -> Mined:
    """Write the `count` most similar hands of other groups for each hand of a configuration's data.

    Args:
        out: a CSV file for `data.pairs`, with the columns `pairs.COLUMNS`.
        picture: a sheet of pairs without augmentation, from the smallest distance to the largest, in equal steps.
        group: "folder": the hands of a folder, such as the frames of a video; "index": the hands that belong together
            in the dataset, such as the versions of a pose or the hands in an image.
        upright: compare shapes that are rotated until the wrist lies below the mean of the keypoints.
        progress: called with (hands done, hands in all).

    Raises:
        UserError: there are several sources, the hands have no keypoints or are all of one group, or a file exists
            already or cannot be written.
    """
    source, *others = each_source(config.data)
    if others:
        raise UserError(f"{1 + len(others)} tables [[data]]: pairs are of one source. Mine each by itself.")
    if source.source == "shards" and group == "folder":
        raise UserError(f"{source.root}: shards have no folder for each video. Give --group index, or mine the source.")
    refuse_existing((out, picture))
    index = load_index(replace(source, positive="self", pairs=None, positive_frames=DataConfig.positive_frames))
    known = _known(index)
    kept = index.select(known)
    assert kept.keypoints_px is not None
    group_of = _folders(kept) if group == "folder" else kept.groups
    groups = len(np.unique(group_of))
    if groups == 1:
        other = "index" if group == "folder" else "folder"
        raise UserError(
            f"{index.root}: all {len(kept)} hands with keypoints are of one {group}, and a partner is of another one. "
            f"Put each video into a folder of its own, or give --group {other}."
        )
    root = kept.skeleton.keypoints.index(kept.skeleton.root)
    shapes = shapes_of(kept.keypoints_px, kept.mirrored, upright=root if upright else None)
    similar = most_similar(principal_components(shapes), group_of, count, progress)
    hand, place = np.nonzero(similar.rows >= 0)
    partner = similar.rows[hand, place]
    distance = distances(shapes[hand], shapes[partner])
    _draw_pairs(config, picture, kept, np.stack([hand, partner], axis=1), distance)  # first, since images may be bad
    _write_pairs(out, index, known[hand], known[partner], distance)
    return Mined(distance, len(np.unique(hand)), groups, len(index) - len(kept), similar.found)


def _known(index: Index) -> IntArray:
    """The rows whose keypoints are all known, and not all at one place."""
    if index.keypoints_px is None:
        known = np.empty(0, np.int64)
    else:
        extent = np.ptp(index.keypoints_px, axis=1).max(axis=1)
        known = np.flatnonzero(extent > 0)  # NaN is not
    if not len(known):
        raise UserError(
            f"{index.root}: no hand has all its keypoints, by which hands are compared. Give --set data.box=FILE.csv "
            "with landmarks, as tools/find_boxes.py writes them, or a source with keypoints."
        )
    return known


def _folders(index: Index) -> IntArray:
    """A number (N,) for the folder of each sample."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(path.rpartition("/")[0], len(numbers)) for path in index.paths], np.int64)


def _write_pairs(out: Path, index: Index, hands: IntArray, partners: IntArray, distance: Floats) -> None:
    names = list(numbered(index))
    for name, _ in names:
        if name.splitlines() != [name]:
            raise UserError(f"{index.root}: {name!r} has a line break in its name. Rename the file.")
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(COLUMNS)
    for hand, partner, far in zip(hands.tolist(), partners.tolist(), distance.tolist(), strict=True):
        lines.writerow([*names[hand], *names[partner], f"{far:.4f}"])
    write_text(out, text.getvalue())


def _draw_pairs(config: Config, picture: Path, index: Index, pairs: IntArray, distance: Floats) -> None:
    """Draw pairs (P, 2) of rows of the index."""
    first = np.flatnonzero(np.diff(pairs[:, 0], prepend=-1))  # of each hand
    by_distance = first[np.argsort(distance[first], kind="stable")]
    steps = np.unique(np.linspace(0, len(first) - 1, SHOWN).round().astype(np.int64))
    shown = pairs[by_distance[steps]]
    rows, among = np.unique(shown, return_inverse=True)
    among = among.reshape(-1, 2)
    sample = index.select(rows)
    sample = replace(sample, partners=of_pairs(among, len(sample)))
    world = single_process(config.train.device)
    with canonical_loader(sample, among[:, 0], len(among), config, world, views=2) as loader:
        save_views(picture, next(iter(loader)), sample, samples=len(among))

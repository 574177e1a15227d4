"""Packed data as a source: the index that `pack` wrote."""

from __future__ import annotations

import logging
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from errors import UserError
from pipelines.config import DataConfig, box_file
from pipelines.samples.index import WHOLE_IMAGE, Blocks, Index, NamesOnDemand
from pipelines.samples.pixels import Pixels
from pipelines.sources.boxes import refuse_boxes, with_boxes
from pipelines.sources.shards.index_file import FOLDER, TARGET, check_shards, read_index_file, read_table
from pipelines.sources.shards.pixels import PIXELS, PixelNames, map_pixels
from pipelines.sources.shards.store import ShardStore
from pipelines.sources.subsets import rows_of_split
from skeleton import SKELETONS

log = logging.getLogger(__name__)


def load_shards(config: DataConfig, *, verify: bool = False) -> Index:
    """Read the index that `pack` wrote, in the order of the packed source, or that `index` wrote of others' shards.

    Args:
        config: names the folder and the split; `data.shuffle_shards` shuffles within so many shards at a time, the
            shards in random order; unset, over all.
        verify: compare the checksum of each sample when it is read.

    Returns:
        The index. Its labels are memory-mapped.

    Raises:
        UserError: the folder has no shards, a shard is missing or cut, the index does not fit, or a key is set that has
            no meaning for shards.
    """
    for key in ("part", "versions"):
        chosen = getattr(config, key)
        if chosen != getattr(DataConfig, key):
            raise UserError(f"data.{key} = {chosen!r}: it was chosen when the shards were packed. Leave it out.")
    root, window = Path(config.root), config.shuffle_shards
    content = read_index_file(root)
    shards: list[dict[str, Any]] = content["shards"]
    folder = root / content.get(FOLDER, "")
    if FOLDER not in content:
        refuse_boxes(config, "shards hold the boxes that they were packed with")
    check_shards(content, folder)
    count = sum(shard["samples"] for shard in shards)
    sums: dict[str, int] = content.get("crc32", {})
    if not sums:
        log.warning(
            "%s: the index was written by an earlier version, without checksums: damage cannot be detected", root
        )
    tables = {name: read_table(root, name, count, sums.get(name)) for name in content["tables"]}
    first = [0, *accumulate(shard["samples"] for shard in shards)]
    names = [shard["file"] for shard in shards]
    whole = np.array(WHOLE_IMAGE, np.float32)
    box_px = np.array(tables["box_px"]) if "box_px" in tables else np.tile(whole, (count, 1))
    pixels: Pixels | None = None
    store: ShardStore | PixelNames = PixelNames(names, first)
    if PIXELS in tables:
        pixels = map_pixels(folder, content, first, tables[PIXELS], box_px, config)
    else:
        store = ShardStore([folder / name for name in names], names, first, tables, window, verify=verify)
    paths = NamesOnDemand(count, store.name)
    index = Index(
        name=content["name"],
        root=folder,
        paths=paths,
        box_px=box_px,
        keypoints_px=tables.get("keypoints_px"),
        mirror=tables.get("mirror"),
        group=tables.get("group"),
        targets={name.removeprefix(TARGET): table for name, table in tables.items() if name.startswith(TARGET)},
        store=store.read,
        pixels=pixels,
        blocks=None if window is None else Blocks(np.array(first, np.int64), window),
        skeleton=SKELETONS[content.get("skeleton", "hand")],
    )
    if (boxes := box_file(config)) is not None:
        index = with_boxes(index, boxes)
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the shards of {root} do not say which of their images belong together, so "
            'they cannot be split. Use "all", or pack the splits apart.'
        )
    return index.select(rows_of_split(np.asarray(index.group), config.split))

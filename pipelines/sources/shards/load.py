"""Shards as a source: the index that `pack` or `index` wrote."""

from __future__ import annotations

import logging
from itertools import accumulate

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, box_file, is_address
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Blocks, Index, LazyNames
from peclr_dali.pipelines.sources.boxes import with_boxes
from peclr_dali.pipelines.sources.shards.index_file import TARGET, IndexFile, choices
from peclr_dali.pipelines.sources.shards.shard_store import LocalShards, Shards, ShardStore
from peclr_dali.pipelines.sources.subsets import rows_of_split
from peclr_dali.skeleton import SKELETONS

log = logging.getLogger(__name__)


def load_shards(config: DataConfig, *, verify: bool = False) -> Index:
    """Read the index that `pack` or `index` wrote. The rows have the order of the packed source or of the shards.

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
    if is_address(config.root):
        from peclr_dali.pipelines.sources.shards.remote_shards import (
            RemoteShards,  # fsspec takes a while to be imported
        )

        shards: Shards = RemoteShards(config)
    else:
        shards = LocalShards(config)
    content, window = shards.content, config.shuffle_shards
    _refuse_choices(config, content)
    if not content.crc32:
        log.warning(
            "%s: the index was written by an earlier version, without checksums: damage cannot be detected", config.root
        )
    tables = {name: shards.table(name) for name in content.tables}
    first = [0, *accumulate(shard.samples for shard in content.shards)]
    count = first[-1]
    store = ShardStore(shards, first, tables, verify=verify or shards.is_remote)
    index = Index(
        name=content.name,
        root=shards.folder,
        paths=LazyNames(count, store.name),
        box_px=np.array(
            tables["box_px"] if "box_px" in tables else np.broadcast_to(WHOLE_IMAGE, (count, 3)), np.float32
        ),
        keypoints_px=tables.get("keypoints_px"),
        mirror=tables.get("mirror"),
        group=tables.get("group"),
        targets={name.removeprefix(TARGET): table for name, table in tables.items() if name.startswith(TARGET)},
        store=store,
        blocks=None if window is None else Blocks(np.array(first, np.int64), window),
        skeleton=SKELETONS[content.skeleton],
    )
    if content.is_foreign and (boxes := box_file(config)) is not None:
        index = with_boxes(index, boxes)
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the shards of {config.root} do not say which of their images belong "
            'together, so they cannot be split. Use "all", or pack each split separately.'
        )
    return index.select(rows_of_split(np.asarray(index.group), config.split))


def _refuse_choices(config: DataConfig, content: IndexFile) -> None:
    """Refuse keys that choose images and boxes, unless they have the command's defaults or their values at packing."""
    defaults = choices(type(config))
    for key, chosen in choices(config).items():
        if chosen in (defaults[key], content.chosen.get(key)) or (
            key == "box" and content.is_foreign and chosen != "joints"
        ):
            continue
        why = "shards of other programs have neither parts nor keypoints, and no box but those of a file"
        if not content.is_foreign:
            known = f", with {content.chosen[key]!r}" if key in content.chosen else ""
            why = f"it was chosen when the shards were packed{known}"
        raise UserError(f"data.{key} = {chosen!r}: {why}. Leave it out, or set its default, {defaults[key]!r}.")

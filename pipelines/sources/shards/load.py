"""Packed data as a source: the index that `pack` wrote."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path, PosixPath
from typing import Any

import numpy as np

from errors import UserError
from pipelines.config import DataConfig, box_file, is_address
from pipelines.samples.index import WHOLE_IMAGE, Blocks, Index, LazyNames
from pipelines.sources.boxes import with_boxes
from pipelines.sources.shards.index_file import (
    FOLDER,
    INDEX_FILE,
    TARGET,
    check_shards,
    how_again,
    parse_index_file,
    read_index_file,
    read_table,
    table_name,
)
from pipelines.sources.shards.shard_store import LocalShards, Shards, ShardStore
from pipelines.sources.subsets import rows_of_split
from skeleton import SKELETONS

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
    window, verify = config.shuffle_shards, verify or is_address(config.root)
    root, folder, content, files, read = _open(config)
    shards: list[dict[str, Any]] = content["shards"]
    _refuse_choices(config, is_packed=FOLDER not in content)
    count = sum(shard["samples"] for shard in shards)
    sums: dict[str, int] = content.get("crc32", {})
    if not sums:
        log.warning(
            "%s: the index was written by an earlier version, without checksums: damage cannot be detected", config.root
        )
    again = how_again(content)
    tables = {
        name: read_table(root / table_name(name), name, count, sums.get(name), again, read(table_name(name)))
        for name in content["tables"]
    }
    first = [0, *accumulate(shard["samples"] for shard in shards)]
    whole = np.array(WHOLE_IMAGE, np.float32)
    box_px = np.array(tables["box_px"]) if "box_px" in tables else np.tile(whole, (count, 1))
    store = ShardStore(files, first, tables, verify=verify)
    paths = LazyNames(count, store.name)
    index = Index(
        name=content["name"],
        root=folder,
        paths=paths,
        box_px=box_px,
        keypoints_px=tables.get("keypoints_px"),
        mirror=tables.get("mirror"),
        group=tables.get("group"),
        targets={name.removeprefix(TARGET): table for name, table in tables.items() if name.startswith(TARGET)},
        store=store,
        blocks=None if window is None else Blocks(np.array(first, np.int64), window),
        skeleton=SKELETONS[content.get("skeleton", "hand")],
    )
    if (boxes := box_file(config)) is not None:
        index = with_boxes(index, boxes)
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the shards of {config.root} do not say which of their images belong "
            'together, so they cannot be split. Use "all", or pack each split separately.'
        )
    return index.select(rows_of_split(np.asarray(index.group), config.split))


def _refuse_choices(config: DataConfig, *, is_packed: bool) -> None:
    """Refuse keys that choose images and boxes of other sources, if they differ from the command's default."""
    for key in ("part", "versions", "center_frac", "box"):
        chosen = getattr(config, key)
        if chosen == getattr(type(config), key) or (key == "box" and not is_packed and chosen != "joints"):
            continue
        why = "it was chosen when the shards were packed"
        if not is_packed:
            why = "shards of other programs have neither parts nor keypoints, and no box but those of a file"
        raise UserError(f"data.{key} = {chosen!r}: {why}. Leave it out.")


class _Address(PosixPath):
    """An address as the root of an index. Its text keeps both slashes of "s3://"; a path would merge them."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def _open(config: DataConfig) -> tuple[Path, Path, dict[str, Any], Shards, Callable[[str], bytes | None]]:
    """Opens a folder of shards.

    Returns:
        The folder with the index, the folder of the shards, what is in index.json, the shards, and a function that
        reads a table's file by its name, or returns None for a file on the disk.
    """
    if is_address(config.root):
        from pipelines.sources.remote.address import Remote  # fsspec takes a while to be imported
        from pipelines.sources.shards.remote_shards import RemoteShards

        remote, address = Remote(config.root), _Address(config.root)
        data = remote.read(INDEX_FILE)
        content = parse_index_file(data, f"{remote.address}/{INDEX_FILE}")
        if FOLDER in content:
            raise UserError(
                f"data.root = {config.root}: is an index of shards of other programs, which are read from a folder "
                "only: it has no checksums of them. Pack the data with 'python cli.py pack'."
            )
        version = hashlib.sha256(data).hexdigest()
        return address, address, content, RemoteShards(remote, version, content["shards"], config), remote.read
    root = Path(config.root)
    content = read_index_file(root)
    folder = root / content.get(FOLDER, "")
    check_shards(content, folder)
    names = [shard["file"] for shard in content["shards"]]
    return root, folder, content, LocalShards(folder, names, config.shuffle_shards), lambda name: None

"""Dataset layouts. Each has a module with a function that returns an `Index`, and its name in `SOURCES`.

The module says `HAS_PARTS = True` if it has a training and an evaluation part (`DataConfig.part`).
"""

import dataclasses
import json
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig, is_address
from peclr_dali.pipelines.samples.index import Index, join
from peclr_dali.pipelines.samples.rules import validate
from peclr_dali.pipelines.samples.subsets import in_fraction
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file, plain_name
from peclr_dali.pipelines.sources.pairs import partners_of
from peclr_dali.writing import write_text

_log = logging.getLogger(__name__)


def load_index(config: DataConfig | Sequence[DataConfig]) -> Index:
    """Read and validate the index of one or several sources, with the margin applied to the boxes, and join them.

    Raises:
        UserError: a folder or file is missing, empty or does not fit the layout, or labels are wrong.
    """
    sources = [config] if isinstance(config, DataConfig) else config
    folders = [Path(source.root).resolve() for source in sources if source.source in ("folder", "coco")]
    for inner, outer in [(one, other) for one in folders for other in folders if other in one.parents]:
        _log.warning(
            "data: %s is within %s, and each is divided by itself: what one holds out may be in the other's training. "
            "Give folders that share no image",
            *(inner, outer),
        )
    return join([_load(source) for source in sources], [source.weight for source in sources])


def _load(config: DataConfig) -> Index:
    index = read_source(config)
    validate(index)
    box_px = index.box_px.copy()
    box_px[:, 2] *= config.box_margin
    return dataclasses.replace(index, box_px=box_px, partners=partners_of(index, config))


def read_source(config: DataConfig) -> Index:
    """Read the samples of a source that its configuration chooses: at least one, not validated, boxes without margin.

    Raises:
        UserError: a folder or file is missing, empty or does not fit the layout.
    """
    if is_address(config.root) and config.source != "shards":
        raise UserError(
            f"data.root = {config.root!r}: only shards are read at an address, and data.source is {config.source!r}. "
            "Pack the data with 'python cli.py pack', copy the shards there, and set data.source = 'shards'."
        )
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # labels may be any numbers, which the rules judge
            index: Index = pkgutil.resolve_name(f"{__name__}.{config.source}:load_{config.source}")(config)
    except OSError as error:
        raise UserError(
            f"{error.filename or config.root}: {error.strerror or error}. Check the path and its permissions"
        ) from error
    chosen = np.arange(len(index))
    if config.bad_list is not None:
        chosen = rows_not_listed(index, Path(config.bad_list))
    if config.label_fraction < 1 and len(index):
        labelled = np.flatnonzero(in_fraction(index.groups, config.label_fraction, seed=config.label_seed))
        chosen = np.intersect1d(labelled, chosen)
    if not len(chosen):
        without = "" if config.bad_list is None else f" and data.bad_list = {config.bad_list!r}"
        raise UserError(
            f"{index.label_file or config.root}: data.split = {config.split!r}{without} leave no image of a usable "
            "hand. "
            + ("Mend the data." if config.split == "all" else 'A tenth of few groups is none: set data.split = "all".')
        )
    return index if len(chosen) == len(index) else index.select(chosen)


def has_parts(source: str) -> bool:
    """Whether a layout has a training and an evaluation part."""
    return hasattr(pkgutil.resolve_name(f"{__name__}.{source}"), "HAS_PARTS")


def write_bad_list(file: Path, reasons: Mapping[str, str]) -> None:
    """Write paths and reasons. Errors as in `writing.whole_file`."""
    write_text(file, "".join(f"{json.dumps({'path': path, 'reason': why})}\n" for path, why in reasons.items()))


def rows_not_listed(index: Index, file: Path) -> IntArray:
    """Rows (M,) int64 of an index whose files are not on the list, ascending; a file may be several rows.

    The list may also have files that the index does not have, such as those of another split. If it has only such
    files, a warning says so, since it may be the list of another dataset.

    Raises:
        UserError: the list cannot be read.
    """
    with dataset_file(file, "a list of bad files", "'python cli.py check-data' makes it.") as path:
        listed = {plain_name(parse_json(line)["path"]) for line in path.read_text("utf-8-sig").splitlines() if line}
    rows = np.array([row for row, name in enumerate(index.paths) if plain_name(name) not in listed], np.int64)
    if listed and len(rows) == len(index):
        _log.warning("%s: none of its %d files is among the images of %s", file, len(listed), index.root)
    return rows

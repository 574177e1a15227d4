"""Images in tar files beside an index.npz, which says where each image is and has its labels.

The command `pack` writes both, or only the index of tar files that another program wrote, such as webdataset's. Images
are read at their offsets, from a folder (`LocalTars`) or from an address (`RemoteTars`).
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.pipelines.config import DataConfig, box_file, is_address
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index, Store
from peclr_dali.pipelines.samples.subsets import rows_of_split
from peclr_dali.pipelines.sources.boxes import with_boxes
from peclr_dali.pipelines.sources.folder import files_under
from peclr_dali.pipelines.sources.shards.tar_index import INDEX_FILE, TARGET, TarIndex, parse_index
from peclr_dali.pipelines.sources.shards.tar_stores import Folder, LocalTars, RemoteTars


def load_shards(config: DataConfig) -> Index:
    """Read the index of tar files that `pack` wrote. The rows have the order of the packed source, or of the tar files.

    Raises:
        UserError: the folder has no index, a tar file is missing or has another size than the index says, or a key is
            set that has no meaning for packed images.
    """
    if is_address(config.root):
        folder = Folder(config.root)
        tars = parse_index(folder.file(INDEX_FILE), f"{folder.address}/{INDEX_FILE}")
        folder.require_ranges(INDEX_FILE)
        sizes = folder.sizes(tars.tars.tolist())
        store: Store = RemoteTars(folder, tars)
    else:
        try:
            file = Path(config.root) / INDEX_FILE
            tars = parse_index(regular(file).read_bytes(), str(file))
            sizes = [(Path(config.root) / name).stat().st_size for name in tars.tars.tolist()]
            if unread := {*files_under(Path(config.root), (".tar",))[0]} - {*tars.tars.tolist()}:
                logging.getLogger(__name__).warning(
                    "%s does not have %s, so it is not read; make the index again with 'python cli.py pack'",
                    file, min(unread),
                )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"{error.filename}: {error.strerror}; expected tar files and their index. Copy the whole folder again, "
                "or make them with 'python cli.py pack', the index alone with 'python cli.py pack --index'"
            ) from error
        store = LocalTars(config.root, tars)
    for name, size, expected in zip(tars.tars, sizes, tars.tar_bytes.tolist(), strict=True):
        if size not in (None, expected):
            raise UserError(
                f"{config.root}/{name} has {size} bytes, and {INDEX_FILE} was made when it had {expected}: copy the "
                "folder again, or make the index again with 'python cli.py pack'"
            )
    _refuse_choices(config, tars)
    labels = tars.labels
    index = Index(
        name=tars.name,
        root=config.root if is_address(config.root) else Path(config.root),
        paths=tars.names(),
        box_px=labels.get("box_px", np.tile(np.array(WHOLE_IMAGE, np.float32), (len(tars.tar), 1))),
        keypoints_px=labels.get("keypoints_px"),
        mirror=labels.get("mirror"),
        group=labels.get("group"),
        targets={name.removeprefix(TARGET): table for name, table in labels.items() if name.startswith(TARGET)},
        store=store,
    )
    if not labels and (boxes := box_file(config)) is not None:
        index = with_boxes(index, boxes)
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the tar files of {config.root} do not say which of their images belong "
            'together, so they cannot be split. Use "all", or pack each split separately.'
        )
    return index.select(rows_of_split(index.group, config.split))


def choices(config: DataConfig | type[DataConfig]) -> Mapping[str, Any]:
    """The keys that choose images and boxes of a source, as JSON has their values, or with their defaults."""
    return {
        "part": config.part,
        "setup": config.setup,
        "versions": list(config.versions),
        "center_frac": config.center_frac,
        "box": config.box,
    }


def _refuse_choices(config: DataConfig, tars: TarIndex) -> None:
    """Refuse keys that choose images and boxes, unless they have the defaults or their values at packing."""
    for (key, default), chosen in zip(choices(type(config)).items(), choices(config).values(), strict=True):
        is_free = key == "box" and not tars.labels and chosen != "joints"
        if not is_free and chosen not in (default, tars.chosen.get(key)):
            raise UserError(
                f"data.{key} = {chosen!r}: it was chosen when the tar files were made"
                f"{f', with {tars.chosen[key]!r}' if key in tars.chosen else ''}. Leave it out"
            )

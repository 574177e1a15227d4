"""The index of a folder of shards: index.json, and a memory-mapped table for each column."""

from __future__ import annotations

import io
import logging
import re
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import parse_json, regular
from pipelines.samples.index import Index
from skeleton import SKELETONS
from writing import whole_file

log = logging.getLogger(__name__)

FORMAT: Final = 1
INDEX_FILE: Final = "index.json"
PACK_FILE: Final = "pack.json"
"""What `pack` writes first: the arguments of the call."""

INDEX_FOLDER: Final = "index"
INDEX_MARK: Final = "made-by-peclr-dali-index"
"""Folder that `index` makes first, and that marks the files beside it as its own. It holds what a call has read."""

TARGET: Final = "target."
"""Start of the names of the tables in `Index.targets`."""

FOLDER: Final = "folder"
"""Key of an index file: the folder of other programs' shards, absolute or relative to the index file."""

_PLACES: Final = {
    "offset": np.dtype(np.uint64),
    "size": np.dtype(np.uint32),
    "crc32": np.dtype(np.uint32),
    "lead": np.dtype(np.uint32),
}
_TABLES: Final = {
    "box_px": np.dtype(np.float32),
    "keypoints_px": np.dtype(np.float32),
    "mirror": np.dtype(np.bool_),
    "group": np.dtype(np.int64),
}
_TARGET_NAME: Final = re.compile(r"target\.\w+")
_READ_BYTES: Final = 1 << 20

Table = npt.NDArray[Any]


def index_tables(index: Index) -> dict[str, Table]:
    """The tables of an index by file name, for `load_shards`."""
    known: dict[str, Table | None] = {name: getattr(index, name) for name in _TABLES}
    known |= {TARGET + name: table for name, table in index.targets.items()}
    return {name: table for name, table in known.items() if table is not None}


def write_tables(root: Path, tables: dict[str, Table]) -> dict[str, int]:
    """Write the tables of an index. Returns the CRC-32 of each file."""
    (root / INDEX_FOLDER).mkdir(exist_ok=True)
    for name, table in tables.items():
        with whole_file(root / INDEX_FOLDER / f"{name}.npy") as file:
            np.save(file, table)
    return {name: table_checksum(root / INDEX_FOLDER / f"{name}.npy") for name in sorted(tables)}


def read_index_file(root: Path) -> dict[str, Any]:
    """Read and check `INDEX_FILE` of a folder of shards.

    Raises:
        UserError: it is missing, or not what `pack` wrote.
    """
    file = root / INDEX_FILE
    try:
        return parse_index_file(regular(file).read_bytes(), str(file))
    except FileNotFoundError:
        begun = [name for name, trace in (("pack", PACK_FILE), ("index", INDEX_MARK)) if (root / trace).exists()]
        hint = "give a folder that 'python cli.py pack' made, or 'python cli.py index' for shards of other programs"
        if begun:
            hint = f"run the same 'python cli.py {begun[0]}' again: it goes on where it stopped"
        raise UserError(f"{root}: no {INDEX_FILE}, so it holds no finished shards; {hint}.") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected the index of shards. Check data.root.") from error


def parse_index_file(data: bytes, file: str) -> dict[str, Any]:
    """Parse and check the content of an index file, named `file` in messages. Wrong content is a `UserError`."""
    try:
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        if content["format"] != FORMAT:
            raise UserError(f"{file}: format {content['format']!r}, expected {FORMAT}. Pack the data again.")
        _check_index_file(content)
    except KeyError as error:
        raise UserError(f"{file}: {error} is missing in this index of shards. Restore it, or make it again.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a readable index of shards ({error}). Restore it, or make it again.") from error
    return dict(content)


def _check_index_file(content: dict[str, Any]) -> None:
    """Check the values of an index file; a wrong one is a `ValueError`."""
    shards, tables = content["shards"], content["tables"]
    if not isinstance(content["name"], str) or not isinstance(shards, list) or not isinstance(tables, list):
        raise ValueError("name, shards or tables are of another kind")
    is_foreign = FOLDER in content
    if not isinstance(content.get(FOLDER, ""), str) or "\0" in content.get(FOLDER, ""):
        raise ValueError("folder is of another kind")
    for shard in shards:
        name = shard["file"]
        parts = name.split("/") if isinstance(name, str) else []
        if not parts or {*parts} & {"", ".", ".."} or (len(parts) > 1 and not is_foreign) or "\0" in name:
            raise ValueError(f"the shard {str(name)[:80]!r} is not a file in this folder")
        if any(type(shard[key]) is not int or shard[key] < 0 for key in ("samples", "bytes")):
            raise ValueError(f"samples and bytes of {name!r} are whole numbers")
        if not isinstance(shard.get("sha256", ""), str):
            raise ValueError(f"sha256 of {name!r} is text")
    for name in tables:
        if not isinstance(name, str) or not (name in _PLACES or name in _TABLES or _TARGET_NAME.fullmatch(name)):
            raise ValueError(f"{str(name)[:80]!r} is no table of an index")
    if "kind" in content:
        raise ValueError(f"kind is {str(content['kind'])[:80]!r}: only shards of image files are read")
    needed = {"offset", "size"} if is_foreign else {"offset", "size", "crc32", "box_px"}
    if not shards or not needed <= {*tables}:
        raise ValueError("something is missing")
    if content.get("skeleton", "hand") not in SKELETONS:
        raise ValueError(f"skeleton is {str(content['skeleton'])[:80]!r}, expected one of {', '.join(SKELETONS)}")
    sums = content.get("crc32", {})
    if not isinstance(sums, dict) or any(type(value) is not int for value in sums.values()):
        raise ValueError("crc32 is of another kind")


def how_again(content: dict[str, Any]) -> str:
    """What to do where shards or their index are damaged, for messages."""
    return "index the shards again" if FOLDER in content else "pack again"


def shards_in_words(count: int) -> str:
    """A number of shards, for messages."""
    return "1 shard" if count == 1 else f"{count} shards"


def table_name(name: str) -> str:
    """The name of a table's file in a folder of shards."""
    return f"{INDEX_FOLDER}/{name}.npy"


def table_checksum(file: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with file.open("rb") as content:
        while block := content.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def check_shards(content: dict[str, Any], folder: Path) -> None:
    """Refuse with a `UserError` shards that are missing or of another size than the index file says.

    Shards of other programs have no checksum: a line is logged if their time of change differs. Copying may change
    this time too.
    """
    shards, again = content["shards"], how_again(content)
    changed = []
    for shard in shards:
        path = folder / shard["file"]
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; the index names {shards_in_words(len(shards))}. Copy this one again, or "
                f"{again}."
            ) from error
        if status.st_size != shard["bytes"]:
            raise UserError(
                f"{path}: {status.st_size} bytes, expected {shard['bytes']}: cut or changed. Copy it again, or {again}."
            )
        if shard.get("changed_ns", status.st_mtime_ns) != status.st_mtime_ns:
            changed.append(path)
    if changed:
        log.warning(
            "%d of %s have another time of change than in the index, such as %s. Copying causes this. If they were "
            "written anew, run 'python cli.py index' again",
            len(changed), shards_in_words(len(shards)), changed[0],
        )  # fmt: skip


def read_table(file: Path, name: str, count: int, checksum: int | None, again: str, data: bytes | None = None) -> Table:
    """Read and check a table of the index.

    Args:
        count: number of rows that it must have.
        checksum: CRC-32 of its file; None compares nothing.
        data: content of the file; None maps the file into memory.
        again: see `how_again`.

    Raises:
        UserError: it cannot be read, or is of other shards.
    """
    try:
        if data is None:
            found = None if checksum is None else table_checksum(file)
            table: Table = np.lib.format.open_memmap(file, mode="r")
        else:
            found = None if checksum is None else zlib.crc32(data)
            table = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(f"{file}: not a readable table of the index ({error}). Copy it again, or {again}.") from error
    dtype = _PLACES.get(name) or _TABLES.get(name, np.dtype(np.float32))
    if name == "keypoints_px" and table.ndim == 3:
        shape: tuple[int, ...] = (table.shape[1], 2)
    else:
        shape = {"box_px": (3,)}.get(name, table.shape[1:] if name.startswith(TARGET) else ())
    if table.dtype != dtype or table.shape != (count, *shape):
        raise UserError(
            f"{file}: {table.dtype} {table.shape}, expected {dtype} with {count} rows: it belongs to other shards. "
            f"Copy the whole folder again, or {again}."
        )
    if found != checksum:
        raise UserError(f"{file}: not the bytes that were packed (wrong checksum). Copy it again, or {again}.")
    return table

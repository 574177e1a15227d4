"""The index of a folder of shards: index.json, and a memory-mapped table for each column."""

from __future__ import annotations

import io
import json
import re
import zlib
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge
from pydantic import AfterValidator, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import one_of
from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import printable
from peclr_dali.parsing import file_name, parse_json, regular
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.skeleton import SKELETONS
from peclr_dali.writing import whole_file, write_text

FORMAT: Final = 1
INDEX_FILE: Final = "index.json"
PACK_FILE: Final = "pack.json"
"""What `pack` writes first: the arguments of the call."""

INDEX_FOLDER: Final = "index"
INDEX_MARK: Final = "made-by-peclr-dali-index"
"""Folder that `index` makes first, and that marks the files beside it as its own. It holds what was read of shards."""

LEFT_OUT_FILE: Final = "left_out.jsonl"

TARGET: Final = "target."
"""Start of the names of the tables in `Index.targets`."""

PLACES: Final[dict[str, np.dtype[Any]]] = {
    "offset": np.dtype(np.uint64),
    "size": np.dtype(np.uint32),
    "crc32": np.dtype(np.uint32),
    "lead": np.dtype(np.uint32),
}
_LABELS: Final[dict[str, np.dtype[Any]]] = {
    "box_px": np.dtype(np.float32),
    "keypoints_px": np.dtype(np.float32),
    "mirror": np.dtype(np.bool_),
    "group": np.dtype(np.int64),
}
_READ_BYTES: Final = 1 << 20

Table = npt.NDArray[Any]
_Whole = Annotated[int, Strict(), Ge(0)]


def _below_a_folder(name: str) -> str:
    if {*name.split("/")} & {"", ".", ".."}:
        raise ValueError(f"the shard {name[:80]!r} is not a file in this folder")
    return file_name(name)


def _known_table(name: str) -> str:
    if name not in PLACES and name not in _LABELS and not re.fullmatch(r"target\.\w+", name):
        raise ValueError(f"{name[:80]!r} is no table of an index")
    return name


@dataclass(frozen=True)
class Shard:
    """A shard.

    Attributes:
        file: its path, from the folder of the shards.
        sha256: of its bytes; None for shards of other programs.
        changed_ns: time of change of another program's shard when it was read, in nanoseconds.
    """

    file: Annotated[str, AfterValidator(_below_a_folder)]
    samples: _Whole
    bytes: _Whole
    sha256: str | None = None
    changed_ns: _Whole | None = None


@dataclass(frozen=True)
class IndexFile:
    """The content of `INDEX_FILE`.

    Attributes:
        name: of the source, for messages.
        tables: names of the tables in `INDEX_FOLDER`.
        crc32: checksum of each table's file; an earlier version wrote none.
        folder: of other programs' shards, absolute or relative to the index file; None for shards of `pack`.
        left_out: number of images that could not be packed.
        chosen: keys of `data` that chose images and boxes for `pack`, see `choices`; an earlier version wrote none.
    """

    name: str
    tables: list[Annotated[str, AfterValidator(_known_table)]]
    shards: list[Shard]
    crc32: dict[str, _Whole] = field(default_factory=dict)
    folder: Annotated[str, AfterValidator(file_name)] | None = None
    left_out: _Whole = 0
    skeleton: Annotated[str, one_of(SKELETONS)] = "hand"
    chosen: dict[str, Any] = field(default_factory=dict)
    format: Literal[1] = FORMAT

    @model_validator(mode="after")
    def _is_complete(self) -> IndexFile:
        needed = {"offset", "size"} if self.is_foreign else {"offset", "size", "crc32", "box_px"}
        if not self.shards or not needed <= {*self.tables}:
            raise ValueError("it names no shards, or not all tables")
        return self

    @property
    def samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the shards."""
        return self.folder is not None

    @property
    def remedy(self) -> str:
        """What to do where shards or their index are damaged, for messages."""
        return "index the shards again" if self.is_foreign else "pack again"


_INDEX_FILE: Final = TypeAdapter(IndexFile)


def choices(config: DataConfig | type[DataConfig]) -> dict[str, Any]:
    """The keys that choose images and boxes of a source, with their values as JSON has them, or with their defaults."""
    versions = list(config.versions)
    return {"part": config.part, "versions": versions, "center_frac": config.center_frac, "box": config.box}


def index_tables(index: Index) -> dict[str, Table]:
    """The labels of an index, as tables by file name, for `load_shards`."""
    known: dict[str, Table | None] = {name: getattr(index, name) for name in _LABELS}
    known |= {TARGET + name: table for name, table in index.targets.items()}
    return {name: table for name, table in known.items() if table is not None}


def write_tables(root: Path, tables: dict[str, Table]) -> dict[str, int]:
    """Write the tables of an index. Returns the CRC-32 of each file."""
    (root / INDEX_FOLDER).mkdir(exist_ok=True)
    for name, table in tables.items():
        with whole_file(root / table_name(name)) as file:
            np.save(file, table)
    return {name: table_checksum(root / table_name(name)) for name in sorted(tables)}


def write_index_file(root: Path, content: IndexFile) -> None:
    """Write `INDEX_FILE`, which makes the shards usable: it is written last."""
    as_tables = _INDEX_FILE.dump_python(content, exclude_none=True)
    write_text(root / INDEX_FILE, json.dumps(as_tables, indent=1) + "\n")


def read_index_file(root: Path) -> IndexFile:
    """Read and check `INDEX_FILE` of a folder of shards.

    Raises:
        UserError: it is missing, or not what `pack` or `index` wrote.
    """
    file = root / INDEX_FILE
    try:
        return parse_index_file(regular(file).read_bytes(), str(file), "Restore it, or make it again.")
    except FileNotFoundError:
        begun = [name for name, trace in (("pack", PACK_FILE), ("index", INDEX_MARK)) if (root / trace).exists()]
        hint = "give a folder that 'python cli.py pack' made, or 'python cli.py index' for shards of other programs"
        if begun:
            hint = f"run the same 'python cli.py {begun[0]}' again: it goes on where it stopped"
        raise UserError(f"{root}: no {INDEX_FILE}, so it holds no finished shards; {hint}.") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected the index of shards. Check data.root.") from error


def parse_index_file(data: bytes, file: str, remedy: str) -> IndexFile:
    """Parse and check the content of an index file; `file` and `remedy` are for messages.

    Raises:
        UserError: it is not what `pack` or `index` wrote.
    """
    try:
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return _INDEX_FILE.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = "".join(f"{part}: " for part in first["loc"][-1:]) + first["msg"]
    except ValueError as error:
        why = str(error)
    raise UserError(f"{file}: not a readable index of shards ({printable(why)[:200]}). {remedy}")


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


def read_table(file: Path, name: str, content: IndexFile, data: bytes | None = None) -> Table:
    """Read and check a table of the index.

    Args:
        data: content of the file; None maps the file into memory.

    Raises:
        UserError: it cannot be read, or is of other shards.
    """
    again = f"Copy the whole folder again, or {content.remedy}."
    checksum = content.crc32.get(name)
    try:
        if data is None:
            found = None if checksum is None else table_checksum(regular(file))
            table: Table = np.lib.format.open_memmap(regular(file), mode="r")
        else:
            found = None if checksum is None else zlib.crc32(data)
            table = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(f"{file}: not a readable table of the index ({error}). {again}") from error
    dtype = PLACES.get(name) or _LABELS.get(name, np.dtype(np.float32))
    if name == "keypoints_px" and table.ndim == 3:
        shape: tuple[int, ...] = (table.shape[1], 2)
    else:
        shape = {"box_px": (3,)}.get(name, table.shape[1:] if name.startswith(TARGET) else ())
    if table.dtype != dtype or table.shape != (content.samples, *shape):
        raise UserError(
            f"{file}: {table.dtype} {table.shape}, expected {dtype} with {content.samples} rows: it belongs to other "
            f"shards. {again}"
        )
    if found != checksum:
        raise UserError(f"{file}: not the bytes that were packed (wrong checksum). {again}")
    return table

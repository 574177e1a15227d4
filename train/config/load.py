"""Composes a configuration from TOML files and `--set`; later ones override earlier ones."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from peclr_dali.bounds import LARGEST_SEED
from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.shipped import or_shipped
from peclr_dali.train.config.mistakes import explain, shortened
from peclr_dali.train.config.shell import is_left_to_shell
from peclr_dali.train.config.tables import is_array_of_tables

T = TypeVar("T")

LARGEST_FILE = 2**20
"""Largest size of a configuration file in bytes."""

TOO_DEEP = "is nested too deeply; expected tables of keys, as --print-config shows them"


def load_config(
    kind: type[T], files: Sequence[Path], overrides: Sequence[str], *, base: Mapping[str, Any] | None = None
) -> T:
    """Read TOML files and then `key=value` overrides; later ones override earlier ones.

    Args:
        kind: the dataclass to fill, such as `Config`.
        files: TOML files, or names of shipped ones, such as "peclr_rn50".
        overrides: "table.key=value". The value is written as in TOML; any other text is taken as a string. In an array
            of tables, "table.0.key=value" changes the first table, and "table.key=value" the only one.
        base: tables that the files override, as from `to_dict`; none by default.

    Raises:
        UserError: a file cannot be read, a key is unknown, or a value has a wrong type or is out of range.
    """
    layers = [(str(file), read_toml(file)) for file in files]
    layers += [(f"--set {override}", _parse_override(override)) for override in overrides]
    values: dict[str, Any] = copy.deepcopy(dict(base or {}))
    for origin, layer in layers:
        _check_values(layer, origin)
        _merge(values, layer, origin)
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(explain(kind, error, layers)) from error


def read_toml(file: Path) -> dict[str, Any]:
    """Read the tables of a TOML file, or of the shipped configuration of that name.

    Raises:
        UserError: the file is not regular, not readable, too large or not TOML.
    """
    file = or_shipped(file, ".toml")
    try:
        size = regular(file).stat().st_size
        if size > LARGEST_FILE:
            raise UserError(
                f"{file}: has {size} bytes; expected a TOML file of at most {LARGEST_FILE}, such as configs/demo.toml"
            )
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a TOML file, such as configs/demo.toml") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not TOML: {shortened(str(error))}. Give a text file, and save it in UTF-8"
        ) from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UserError(f"{file}: {TOO_DEEP}") from error
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {shortened(str(error))}{_remedy_for(text)}") from error


def _remedy_for(text: str) -> str:
    """Advice if a text is not TOML because of typographic quotes or of backslashes in Windows paths."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if any(quote in line for line in lines for quote in "\u201c\u201d\u201e\u2018\u2019"):
        return '. It has typographic quotes: write straight ones, "..."'
    if any("\\" in line for line in lines):
        return ". In \"...\" a backslash begins an escape: write / in paths, or '...'"
    return ""


def _parse_override(override: str) -> dict[str, Any]:
    """Convert a `--set` to nested tables."""
    key, equals, text = override.partition("=")
    tables = key.strip().split(".")
    if not equals or not all(tables):
        raise UserError(f"--set {override or repr('')}: expected table.key=value, such as --set optim.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    layer: dict[str, Any] = {tables.pop(): value}
    for table in reversed(tables):
        layer = {table: layer}
    return layer


def _check_values(layer: Mapping[str, Any], origin: str) -> None:
    """Refuse values that no key can have: numbers beyond 64 bits, NaN, strings that cannot be a path, deep nesting."""
    for key, value in _leaves("", layer, origin, levels=7):
        problem = None
        if isinstance(value, float) and not math.isfinite(value):
            problem = f" = {value!r}: expected finite numbers, so give others"
        elif isinstance(value, int) and abs(value) > LARGEST_SEED:
            problem = f" has {value.bit_length()} bits: expected a number of 64 bits at most"
        elif isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):  # from bytes that are not UTF-8
            problem = f" = {value!r}: expected UTF-8 without NUL; rename the file or folder"
        elif isinstance(value, str) and not value.strip():
            problem = " is empty: give a value, or leave the key out. Is a variable not set?"
        elif isinstance(value, str) and is_left_to_shell(value):
            problem = f" = {value!r}: ~ and $NAME are not replaced here; write the path out"
        if problem is not None:
            raise UserError(f"{origin}: {key}{problem}")


def _leaves(key: str, value: Any, origin: str, levels: int) -> Iterator[tuple[str, Any]]:
    """Yield each value that is neither table nor array, with its dotted key. At most `levels` tables may be nested."""
    if levels == 0:
        raise UserError(f"{origin}: {TOO_DEEP}")
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(f"{key}.{name}".lstrip("."), one, origin, levels - 1)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(key, one, origin, levels - 1)
    else:
        yield key, value


def _merge(into: dict[str, Any], layer: Mapping[str, Any], origin: str) -> None:
    for key, value in layer.items():
        below = into.get(key)
        if isinstance(value, Mapping) and value and all(part.isdecimal() for part in value):
            into.setdefault(key, {})
            for number, table in value.items():
                if not isinstance(table, Mapping):
                    raise UserError(f"{origin}: {key}.{number} is a table: change one of its keys, {key}.{number}.key")
                _merge(_numbered(into[key], key, number, origin), table, origin)
        elif isinstance(value, Mapping) and is_array_of_tables(below):
            if len(below) > 1:
                raise UserError(
                    f"{origin}: there are {len(below)} tables [[{key}]]: say which one to change, such as "
                    f"--set {key}.0.{next(iter(value), 'key')}=..."
                )
            _merge(below[0], value, origin)
        elif isinstance(value, Mapping) and isinstance(below, dict):
            _merge(below, value, origin)
        else:
            into[key] = copy.deepcopy(value)


def _numbered(tables: Any, key: str, number: str, origin: str) -> dict[str, Any]:
    """The table with this number; a single table is number 0."""
    array = tables if is_array_of_tables(tables) else [tables]
    if len(number) > 9 or int(number) >= len(array) or not isinstance(array[int(number)], dict):
        raise UserError(f"{origin}: there is no {key}.{shortened(number)}; expected {key}.0 to {key}.{len(array) - 1}")
    table: dict[str, Any] = array[int(number)]
    return table

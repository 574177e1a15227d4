"""Composes a configuration from TOML files and `--set`; later ones override earlier ones."""

import copy
import dataclasses
import difflib
import logging
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import TypeAdapter, ValidationError

from peclr_dali.errors import UserError
from peclr_dali.parsing import is_left_to_shell, or_shipped, regular
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config

log = logging.getLogger(__name__)

T = TypeVar("T")

FREE_ON_RESUME = (
    "run.out",
    "run.log_every",
    "run.checkpoint_every",
    "run.keep",
    "run.log_samples",
    "run.rank_timeout_s",
    "run.tensorboard",
    "data.root",
    "data.max_bad_share",
    "data.regressor",
    "pipelines",
    "encoder.weights",
    "train.recompute",
    "train.cuda_graph",
    "train.compile",
    "train.device",
    "train.threads",
    "validation",
    "probe",
)
"""Keys and tables that a resumed run may change, since they do not change what is trained."""

FREE_BETWEEN_RANKS = ("data.root", "pipelines", "train.threads")
"""Keys and tables that may differ between the ranks of a run, since they are of the host."""


def to_dict(config: object) -> dict[str, Any]:
    """Nested tables of a configuration, without keys that are None, which TOML cannot express."""
    return dict(TypeAdapter(type(config)).dump_python(config, mode="json", exclude_none=True))


def to_toml(config: Any) -> str:
    """The configuration as TOML, with a comment for each key that is None."""
    parts: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        tables = value if isinstance(value, tuple) else (value,)
        header = f"[[{field.name}]]" if len(tables) > 1 else f"[{field.name}]"
        for table in tables:
            values, keys = to_dict(table), [key.name for key in dataclasses.fields(table)]
            lines = [tomli_w.dumps({key: values[key]}) if key in values else f"# {key} is not set\n" for key in keys]
            parts.append(f"{header}\n{''.join(lines)}")
    return "\n".join(parts)


def as_toml(value: Any) -> str:
    """A value as TOML, for `--set`."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip()


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables. Tables of an array are numbered from 0."""
    for key, value in tables.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(table, Mapping) for table in value):
            value = {str(number): table for number, table in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(before: object, after: object) -> str | None:
    """The first change that a resumed run must not make, as "key: was x, is now y"; None if there is none."""
    was, now = (dict(flatten(to_dict(config))) for config in (before, after))
    key = first_different_key(was, now, FREE_ON_RESUME)
    return None if key is None else f"{key}: was {was.get(key)!r}, is now {now.get(key)!r}"


def first_different_key(one: Mapping[str, Any], other: Mapping[str, Any], free: Container[str]) -> str | None:
    """The first dotted key whose values differ, unless the key or its table is in `free`; None if there is none."""
    for key in sorted(one.keys() | other.keys(), key=lambda key: (not key.endswith(".name"), key)):  # names explain
        if one.get(key) != other.get(key) and without_numbers(key) not in free and key.split(".")[0] not in free:
            return key
    return None


def without_numbers(key: str) -> str:
    """Remove the numbers from a key: data.1.root -> data.root."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


Layer = tuple[str, Mapping[str, Any]]
"""A file or an option, with its tables."""


def load_config(
    kind: type[T], files: Sequence[Path], overrides: Sequence[str], *, base: Mapping[str, Any] | None = None
) -> T:
    """Read TOML files and then `key=value` overrides; later ones override earlier ones.

    Args:
        kind: the dataclass to fill, such as `Config`.
        files: TOML files, or names of shipped ones, such as "peclr_rn50".
        overrides: "table.key=value". The value is written as in TOML; any other text is taken as a string. With several
            tables [[data]], "data.0.key=value" changes the first one; with one, "data.key=value" does.
        base: tables that the files override, as from `to_dict`; by default those of `kind`.

    Raises:
        UserError: a file cannot be read, a key is unknown, or a value has a wrong type or is out of range.
    """
    layers: list[Layer] = [(str(file), read_toml(file)) for file in files]
    layers += [(f"--set {override}", _parse_override(override)) for override in overrides]
    values = copy.deepcopy(dict(base or to_dict(kind())))
    for number, (origin, tables) in enumerate(layers):
        if isinstance(tables.get("data"), list) and (before := _origin(layers[:number], "data")):
            log.warning("%s: its [[data]] replaces [data] of %s and all keys in it", origin, before.removesuffix(": "))
        _merge(values, tables, origin)
    try:
        config = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(kind, error, layers)) from error
    taken = dict(flatten(to_dict(config)))
    for key, value in flatten(values):
        found = f"{_origin(layers, key)}{key} = {value!r}"
        items = value if isinstance(value, list) else [value]
        # For pydantic, true is 1. A single table [data] becomes a list, whose keys are numbered.
        if any(isinstance(item, bool) for item in items) and not isinstance(taken.get(key, value), bool):
            raise UserError(f"{found}: input should be a number")
        if isinstance(value, str) and is_left_to_shell(value):
            raise UserError(f"{found}: ~ and $NAME are not replaced here; write it out")
    return config


def read_toml(file: Path) -> dict[str, Any]:
    """Read the tables of a TOML file, or of the shipped configuration of that name.

    Raises:
        UserError: the file cannot be read, or is not TOML.
    """
    file = or_shipped(file, ".toml")
    try:
        return tomllib.loads(regular(file).read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file}: {reason}; expected a TOML file, such as configs/demo.toml") from error


def _parse_override(override: str) -> dict[str, Any]:
    """Convert a `--set` to nested tables."""
    key, equals, text = override.partition("=")
    tables = key.strip().split(".")
    if not equals or not all(tables):
        raise UserError(f"--set {override or repr('')}: expected table.key=value, such as --set optim.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"] if "\n" not in text.strip() else text
    except (ValueError, RecursionError):
        value = text.strip()
    for table in reversed(tables):
        value = {table: value}
    assert isinstance(value, dict)
    return value


def _merge(into: dict[str, Any], tables: Mapping[str, Any], origin: str) -> None:
    """Override values by those of tables from a file or an option, its `origin`."""
    for key, value in tables.items():
        below = into.get(key)
        if isinstance(value, Mapping) and isinstance(below, list) and all(isinstance(table, dict) for table in below):
            _merge_numbered(below, key, value, origin)
        elif isinstance(value, Mapping) and isinstance(below, dict):
            _merge(below, value, origin)
        else:
            into[key] = copy.deepcopy(value)


def _merge_numbered(into: list[Any], name: str, tables: Mapping[str, Any], origin: str) -> None:
    """Override values of an array of tables. The tables are {"0": table, ...}, or the keys of the only table."""
    is_numbered = all(key.isdecimal() for key in tables)
    for number, table in tables.items() if is_numbered else [("0", tables)]:
        if not (is_numbered or len(into) == 1) or int(number) >= len(into) or not isinstance(table, Mapping):
            expected = " or ".join(f"{name}.{index}.key=value" for index in range(len(into)))
            raise UserError(f"{origin}: {len(into)} tables [[{name}]]: expected {expected}")
        _merge(into[int(number)], table, origin)


def _explain(kind: type[Any], error: ValidationError, layers: Sequence[Layer]) -> str:
    """One line about the first error: where, what was found, what was expected."""
    first = error.errors(include_url=False)[0]
    key, value = ".".join(map(str, first["loc"])), first["input"]
    where = _origin(layers, key)
    if first["type"] == "unexpected_keyword_argument":
        plain, known = without_numbers(key), _keys_of(kind)
        matches = difflib.get_close_matches(plain, known, 1) or [name for name in known if name.endswith(f".{plain}")]
        remedy = f"did you mean {matches[0]}?" if matches else "--print-config shows all keys"
        other, commands = (FinetuneConfig, "finetune and probe") if kind is Config else (Config, "pretrain")
        if any(f"{name}.".startswith(f"{plain}.") for name in _keys_of(other)):
            remedy = f"it is one of {commands}; take it out, or give this command a configuration of its own"
        return f"{where}unknown key {key}: {remedy}"
    message = first["msg"].removeprefix("Value error, ")
    found = "" if isinstance(value, Mapping) or dataclasses.is_dataclass(value) else f" = {value!r:.200}"
    return f"{where}{key}{found}: {message[0].lower()}{message[1:]}"


def _keys_of(kind: type[Any]) -> list[str]:
    """The dotted keys of a kind of configuration, without numbers of sources."""
    return [without_numbers(key) for key, _ in flatten(dataclasses.asdict(kind()))]


def _origin(layers: Sequence[Layer], key: str) -> str:
    """The last file or option that sets a key, or a key of its table, as the beginning of a message."""
    plain = f"{without_numbers(key)}."
    for name, tables in reversed(layers):
        if any(f"{without_numbers(one)}.".startswith(plain) for one, _ in flatten(tables)):
            return f"{name}: "
    return ""

"""Converts configurations to nested tables and TOML, and compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import TypeAdapter

FREE_ON_RESUME = (
    "run.out",
    "run.log_every",
    "run.checkpoint_every",
    "run.keep",
    "run.log_samples",
    "run.rank_timeout_s",
    "run.tensorboard",
    "run.profile_steps",
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
    tables: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json", exclude_none=True)
    return tables


def to_toml(config: Any) -> str:
    """The configuration as TOML, with a comment for each key that is None."""
    parts: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        tables = value if isinstance(value, tuple) else (value,)
        header = f"[[{field.name}]]" if len(tables) > 1 else f"[{field.name}]"
        parts += [f"{header}\n{_keys_as_toml(table)}" for table in tables]
    return "\n".join(parts)


def _keys_as_toml(table: Any) -> str:
    """One line for each key."""
    values = to_dict(table)
    names = [field.name for field in dataclasses.fields(table)]
    return "".join(tomli_w.dumps({key: values[key]}) if key in values else f"# {key} is not set\n" for key in names)


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
        is_free = without_numbers(key) in free or key.split(".")[0] in free
        if not is_free and one.get(key) != other.get(key):
            return key
    return None


def without_numbers(key: str) -> str:
    """Remove the numbers from a key: data.1.root -> data.root."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())

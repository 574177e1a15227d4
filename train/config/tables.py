"""Converts configurations to nested tables and TOML, and compares them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeGuard

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


_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""Pattern of a name and its meaning in the "Attributes" of a docstring."""


def to_dict(config: object) -> dict[str, Any]:
    """Nested tables of a configuration, without keys that are None, which TOML cannot express."""
    tables: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json", exclude_none=True)
    return tables


def to_toml(config: Any) -> str:
    """The configuration as TOML. Keys that are None are comments with their meaning."""
    parts: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            parts += [f"[[{field.name}]]\n{_table_as_toml(table)}" for table in value]
        else:
            parts.append(f"[{field.name}]\n{_table_as_toml(value)}")
    return "\n".join(parts)


def as_toml(value: Any) -> str:
    """A value as TOML, for `--set`."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip()


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables. Tables of an array are numbered from 0."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif is_array_of_tables(value):
            yield from flatten({str(number): table for number, table in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(saved: Mapping[str, Any], config: object) -> str | None:
    """The first change that a resumed run must not make, as "key: was x, is now y"; None if there is none.

    A key that the saved tables lack, as those of an earlier version may, counts with its default.
    """
    after, defaults = dict(flatten(to_dict(config))), dict(flatten(to_dict(type(config)())))
    before = {key: defaults[plain] for key in after if (plain := without_numbers(key)) in defaults}
    before.update(flatten(saved))
    key = first_different_key(before, after, FREE_ON_RESUME)
    return None if key is None else f"{key}: was {before.get(key)!r}, is now {after.get(key)!r}"


def first_different_key(one: Mapping[str, Any], other: Mapping[str, Any], free: Container[str]) -> str | None:
    """The first dotted key whose values differ, unless the key or its table is in `free`; None if there is none."""
    for key in sorted(one.keys() | other.keys(), key=lambda key: (not key.endswith(".name"), key)):  # names explain
        is_free = without_numbers(key) in free or key.split(".")[0] in free
        if not is_free and one.get(key) != other.get(key):
            return key
    return None


def is_array_of_tables(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a value is an array of tables, [[table]] in TOML."""
    return isinstance(value, list) and bool(value) and all(isinstance(table, Mapping) for table in value)


def without_numbers(key: str) -> str:
    """Remove the numbers from a key: data.1.root -> data.root."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def _table_as_toml(table: Any) -> str:
    """One line for each key."""
    values, meanings = to_dict(table), key_meanings(type(table))
    return "".join(
        tomli_w.dumps({field.name: values[field.name]})
        if field.name in values
        else f"# {field.name} is not set: {meanings[field.name]}\n"
        for field in dataclasses.fields(table)
    )


def key_meanings(kind: type[object]) -> dict[str, str]:
    """The meaning of each attribute, in one line, from the docstrings of a class and its base classes."""
    meanings: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        _, _, attributes = (inspect.getdoc(one) or "").partition("Attributes:\n")
        meanings |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
    return meanings

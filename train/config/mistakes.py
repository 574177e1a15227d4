"""Explains an error in a configuration in one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import flatten, without_numbers

_EXPECTED = {
    "tuple_type": 'expected a list in brackets, such as [1, 2] or ["a", "b"]',
    "too_long": "expected at most {max_length} items, found {actual_length}",
    "too_short": "expected at least {min_length}, found {actual_length}",
    "dataclass_type": "expected a table of keys, as [{key}] in a file or --set {key}.KEY=VALUE",
    "string_type": 'expected a string; write it in quotes: {key} = "...", or --set \'{key}="..."\'',
}
"""Messages for the types of pydantic's errors whose own messages mention Python."""


def explain(kind: type[object], error: ValidationError, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """One line about the first error: where, what was found, what was expected.

    Args:
        kind: the configuration's class.
        error: pydantic's error.
        layers: each file or option with its tables; later ones override earlier ones.
    """
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith("[")]  # without the tags of `OneOrMore`
    known = set(_known_keys(kind))
    key = ".".join(path)
    has_names_of_users = get_origin(get_type_hints(kind).get((path or [""])[0])) is dict
    if first["type"] not in ("unexpected_keyword_argument", "missing") and not has_names_of_users:
        # A union's alternatives appear behind the key; the key is the longest known prefix.
        prefixes = (".".join(path[:end]) for end in range(len(path), 0, -1))
        key = next((prefix for prefix in prefixes if without_numbers(prefix) in known), key)
    where = next((f"{origin}: " for origin, tables in reversed(layers) if _sets(tables, key)), "")
    if first["type"] == "missing":
        return f"{where or f'{layers[0][0]}: '}{key} is missing: give it a value"
    if first["type"] == "unexpected_keyword_argument":
        return f"{where}unknown key {shortened(key)}: {_hint(key, known)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in _EXPECTED:
        message = _EXPECTED[first["type"]].format(key=key, **first.get("ctx", {}))
    value = first["input"]
    if first["type"] == "literal_error":
        options = re.findall(r"'(\w+)'", first["ctx"]["expected"])
        message += "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(str(value), options, 1))
    found = str(value) if isinstance(value, date | time) else repr(value)
    return f"{where}{key} = {shortened(found)}: {message[0].lower()}{message[1:]}"


def shortened(text: str) -> str:
    """The text, cut if it is long."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def _sets(tables: Mapping[str, Any], key: str) -> bool:
    """Whether tables set a key, a key of its table, or the array of which it is an item."""
    return any(f"{one}.".startswith(f"{key}.") or one == key.rpartition(".")[0] for one, _ in flatten(tables))


def _hint(key: str, known: set[str]) -> str:
    """A hint for an unknown key."""
    for command, kind in (("pretrain", Config), ("finetune", FinetuneConfig)):
        keys = set(_known_keys(kind))
        if not keys <= known and without_numbers(key) in keys:
            return f"it is a key of '{command}', not of this command"
    table, _, name = without_numbers(key).rpartition(".")
    matches = difflib.get_close_matches(without_numbers(key), known, 1)
    matches += sorted(one for one in known if one.endswith(f".{name}"))
    if matches:
        return f"did you mean {matches[0]}?"
    siblings = (one for one in known if one.rpartition(".")[0] == (table if table in known else ""))
    return f"expected one of {', '.join(sorted(siblings))}"


def _known_keys(kind: type[object], prefix: str = "") -> Iterator[str]:
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        yield f"{prefix}{field.name}"
        for table in _tables_in(types[field.name]):
            yield from _known_keys(table, f"{prefix}{field.name}.")


def _tables_in(annotation: Any) -> Iterator[type[object]]:
    """The dataclasses that a table, or an array of tables, may have."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation
    elif get_origin(annotation) is not dict:
        for one in get_args(annotation):
            yield from _tables_in(one)

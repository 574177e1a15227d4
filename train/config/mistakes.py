"""Explains an error in a configuration in one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from models.losses import LOSSES
from models.losses.loss import Loss
from train.config.finetuning import FinetuneConfig
from train.config.pretraining import Config
from train.config.tables import flatten, without_numbers

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
    # A union's alternatives appear behind the key; the key is the longest known prefix.
    prefixes = (".".join(path[:end]) for end in range(len(path), 0, -1))
    key = next((prefix for prefix in prefixes if without_numbers(prefix) in known), None)
    unknown = first["type"] == "unexpected_keyword_argument"
    named = get_origin(get_type_hints(kind).get((path or [""])[0])) is dict  # its tables have names of the user's
    shown = ".".join(path) if unknown or key is None or named else key
    where = _origin(shown, layers)
    if first["type"] == "missing":
        where = where or next((origin for origin, _ in layers), None)
        return f"{f'{where}: ' if where else ''}{'.'.join(path)} is missing: give it a value"
    prefix = f"{where}: " if where else ""
    if unknown:
        return f"{prefix}unknown key {shortened(shown)}: {_hint(shown, known)}"
    expected = _EXPECTED.get(first["type"])
    message = (
        expected.format(key=shown, **first.get("ctx", {})) if expected else first["msg"].removeprefix("Value error, ")
    )
    value = first["input"]
    if first["type"] == "literal_error" and (meant := _meant(value, first["ctx"]["expected"])):
        message += f"; did you mean {meant}?"
    found = str(value) if isinstance(value, date | time) else repr(value)
    return f"{prefix}{shown} = {shortened(found)}: {message[0].lower()}{message[1:]}"


def _meant(value: object, expected: str) -> str | None:
    """The value nearest to a misspelt one, from pydantic's list of values, such as "'auto', 'cpu' or 'cuda'"."""
    return next(iter(difflib.get_close_matches(str(value), re.findall(r"'(\w+)'", expected), 1, 0.6)), None)


def shortened(text: str) -> str:
    """The text, cut if it is long."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def _origin(key: str, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The last file or option that sets a key or a key of its table. For an item of an array: the last one that sets
    the array.
    """
    given = [(origin, [name for name, _ in flatten(layer)]) for origin, layer in reversed(layers)]
    within = next((origin for origin, keys in given if any(f"{one}.".startswith(f"{key}.") for one in keys)), None)
    return within or next((origin for origin, keys in given if key.rpartition(".")[0] in keys), None)


def _hint(key: str, known: set[str]) -> str:
    """A hint for an unknown key."""
    for command, kind in (("pretrain", Config), ("finetune", FinetuneConfig)):
        keys = set(_known_keys(kind))
        if not keys <= known and without_numbers(key) in keys:
            return f"it is a key of '{command}', not of this command"
    if key in known:
        owners = " or ".join(repr(name) for name, one in LOSSES.items() if key in _known_keys(one, "loss."))
        return f"it is a key of loss.name = {owners}: choose that loss, or leave the key out"
    table, _, _ = key.partition(".")
    name = key.split(".")[-1]
    matches = difflib.get_close_matches(without_numbers(key), known, 1, 0.6) or [
        one for one in sorted(known) if "." in one and one.split(".")[-1] == name
    ]
    if matches:
        return f"did you mean {matches[0]}?"
    inside = "." in key and table in known
    siblings = sorted(one for one in known if (one.startswith(f"{table}.") if inside else "." not in one))
    return f"expected one of {', '.join(siblings)}"


def _known_keys(kind: type[object], prefix: str = "") -> Iterator[str]:
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        yield f"{prefix}{field.name}"
        for table in _tables_in(types[field.name]):
            yield from _known_keys(table, f"{prefix}{field.name}.")


def _tables_in(annotation: Any) -> Iterator[type[object]]:
    """The dataclasses that a table, or an array of tables, may have; a loss table has one for each loss."""
    if annotation is Loss:
        yield from LOSSES.values()
    elif dataclasses.is_dataclass(annotation):
        yield cast(type[object], annotation)
    elif get_origin(annotation) in (tuple, Union):
        for one in get_args(annotation):
            yield from _tables_in(one)

"""Reads large JSON files element by element, so that they need not fit into memory, and checks the elements."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from rich.console import Console
from rich.progress import open as open_with_progress

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.sources.annotations.dataset_file import dataset_file

_PIECE_CHARS = 1 << 22
_LONG_BYTES = 50_000_000
"""Smallest size in bytes for which a progress bar is shown."""

_NOT_SPACE: Final = re.compile(r"[^ \t\n\r]")
_AFTER_NUMBER: Final = frozenset(",]} \t\n\r")

T = TypeVar("T")


def elements(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (key, element) for every list in a JSON object, in the order of the file.

    Only one element is in memory at a time. Values of the object that are not lists are skipped.

    Raises:
        UserError: the file is missing, unreadable or not a JSON object.
    """
    expected = "the dataset's annotations, a JSON object"
    with dataset_file(file, expected, "Check data.root, or unpack the dataset again.") as path, _open(path) as text:
        yield from _Reader(text).lists()


def checked(kind: TypeAdapter[T], entry: object, where: str) -> T:
    """The element as `kind` describes it; a `UserError` names its place, `where`, and the first mistake."""
    try:
        return kind.validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f" {name}:" for name in first["loc"])
        raise UserError(f"{where}:{place} {first['msg'][:160]}. Unpack the dataset again.") from error


def rows_of_images(file: Path, images: Sequence[Hashable], image_ids: Sequence[Hashable]) -> IntArray:
    """The row among `images`, which are ids, of the image of each annotation, (N,).

    Raises:
        UserError: there are no images or no annotations, or an annotation's image is unknown.
    """
    if not images or not image_ids:
        raise UserError(
            f"{file}: {len(images)} images and {len(image_ids)} annotations; expected some in the lists 'images' and "
            "'annotations'. Unpack the dataset again."
        )
    row_of = {image: row for row, image in enumerate(images)}
    for unknown in set(image_ids) - row_of.keys():
        raise UserError(
            f"{file}, annotation {image_ids.index(unknown)}: none of the {len(images)} images has the id {unknown}. "
            "Use images and annotations of one file, as published."
        )
    return np.array([row_of[image] for image in image_ids], np.int64)


def _open(file: Path) -> AbstractContextManager[IO[str]]:
    if file.stat().st_size < _LONG_BYTES:
        return file.open(encoding="utf-8-sig")
    console = Console(stderr=True)
    task = f"reading {file.name}, once"
    return open_with_progress(file, "r", encoding="utf-8-sig", description=task, console=console, transient=True)


class _Reader:
    """The part of the text that is in memory. It moves forward, and grows if an element is larger."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self._window, self._at = text, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def lists(self) -> Iterator[tuple[str, Any]]:
        for _ in self._items("{", "}"):
            key = self._value()
            if not isinstance(key, str):
                raise ValueError("a key that is not text")
            self._take(":")
            if self._next() != "[":
                self._value()
                continue
            for _ in self._items("[", "]"):
                yield key, self._value()

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Stop before each item of a list or an object."""
        self._take(opening)
        separator = self._take(closing) if self._next() == closing else ","
        while separator == ",":
            yield
            separator = self._take("," + closing)

    def _value(self) -> Any:
        if self._next() == "{":  # most elements are objects without others: their text, and a faster parser
            end = self._window.find("}", self._at) + 1
            try:
                value = from_json(self._window[self._at : end])
            except ValueError:
                pass
            else:
                self._at = end
                return value
        while True:
            try:
                value, stop = self._decode(self._window, self._at)
            except json.JSONDecodeError:
                if not self._grow():
                    raise
                continue
            # A number at the window's end may continue beyond it: "1" and then "2", or "1." and then "5".
            ends = not isinstance(value, int | float) or self._window[stop : stop + 1] in _AFTER_NUMBER
            if ends or not self._grow():
                self._at = stop
                return value

    def _take(self, expected: str) -> str:
        """Consume one of the expected characters."""
        found = self._next()
        if not found or found not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, found {found!r}")
        self._at += 1
        return found

    def _next(self) -> str:
        """Skip white space. Returns the next character, or "" at the end of the file."""
        while (found := _NOT_SPACE.search(self._window, self._at)) is None:
            self._at = len(self._window)
            if not self._grow():
                return ""
        self._at = found.start()
        return found[0]

    def _grow(self) -> bool:
        """Drop the consumed text and read more; False at the end of the file."""
        piece = self._text.read(_PIECE_CHARS)
        if piece:
            self._window, self._at = self._window[self._at :] + piece, 0
        return bool(piece)

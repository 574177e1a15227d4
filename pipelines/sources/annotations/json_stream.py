"""Reads large JSON files element by element, so that they need not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import open as open_with_progress

from errors import UserError
from parsing import regular

_PIECE_CHARS = 1 << 22
_LONG_BYTES = 50_000_000
"""Smallest size in bytes for which a progress bar is shown."""

_SPACE = " \t\n\r"
_AFTER_NUMBER = frozenset(",]}" + _SPACE)


def elements(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (key, element) for every list in a JSON object, in the order of the file.

    Only one element is in memory at a time. Values of the object that are not lists are skipped.

    Raises:
        UserError: the file is missing, unreadable or not a JSON object.
    """
    try:
        with _open(file) as text:
            yield from _Reader(text).lists()
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; expected the dataset's annotations there. Check data.root.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a readable JSON file ({error}). Unpack the dataset again.") from error


def _open(file: Path) -> AbstractContextManager[IO[str]]:
    if regular(file).stat().st_size < _LONG_BYTES:
        return file.open(encoding="utf-8-sig")
    shown = Console(stderr=True)
    what = f"reading {file.name}, once"
    return open_with_progress(file, "r", encoding="utf-8-sig", description=what, console=shown, transient=True)


class _Reader:
    """The part of the text that is in memory. It moves forward, and grows if an element is larger."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self._window, self._at = text, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def lists(self) -> Iterator[tuple[str, Any]]:
        self._take("{")
        if self._skip_space() == "}":
            return
        while True:
            key = self._value()
            if not isinstance(key, str):
                raise ValueError("a key that is not text")
            self._take(":")
            if self._skip_space() == "[":
                yield from ((key, element) for element in self._list())
            else:
                self._value()
            if self._take(",}") == "}":
                return

    def _list(self) -> Iterator[Any]:
        self._take("[")
        if self._skip_space() == "]":
            self._take("]")
            return
        while True:
            yield self._value()
            if self._take(",]") == "]":
                return

    def _value(self) -> Any:
        self._skip_space()
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
        found = self._skip_space()
        if not found or found not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, found {found!r}")
        self._at += 1
        return found

    def _skip_space(self) -> str:
        """Skip white space. Returns the next character, or "" at the end of the file."""
        while True:
            while self._at < len(self._window):
                if self._window[self._at] not in _SPACE:
                    return self._window[self._at]
                self._at += 1
            if not self._grow():
                return ""

    def _grow(self) -> bool:
        """Drop the consumed text and read more; False at the end of the file."""
        piece = self._text.read(_PIECE_CHARS)
        if piece:
            self._window, self._at = self._window[self._at :] + piece, 0
        return bool(piece)

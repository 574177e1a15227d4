"""The tar files that a user names: files, folders, globs and brace patterns."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from braceexpand import braceexpand

from errors import UserError

_MOST_FILES: Final = 1_000_000
"""Most files that a pattern may name."""

_ENDINGS: Final = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Endings of the shards of a folder. Compressed ones are among them, so that a message refuses them."""

_INNERMOST: Final = re.compile(r"\{([^{}]*)\}")
_NUMBERS: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$")
_LETTERS: Final = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?$")
_COUNTED: Final = re.compile(r"\0(\d+)\0")
"""Mark that `_count` puts in place of counted braces: their count between zero bytes, which no path contains."""


def find_shards(patterns: Sequence[str], say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files that patterns name, each once, as absolute paths.

    Args:
        patterns: each a file; a folder, which stands for the tar files in it and below it; or a pattern of files with
            braces ("{000..099}.tar", "{a,b}.tar") or with *, ? and []. Braces keep their order; what is found in a
            folder or by a glob is sorted. Hidden files of a folder are left out.
        say: gets a line if files are left out because links lead to them a second time.

    Raises:
        UserError: a pattern is wrong or names no file.
    """
    found: dict[str, str] = {}  # the file behind all links -> the first name of it
    again: dict[str, str] = {}
    for pattern in patterns:
        for file in _files(pattern):
            name = os.path.abspath(file)  # noqa: PTH100  links stay as they are
            first = found.setdefault(os.path.realpath(file), name)
            if first != name:
                again[name] = first
        if len(found) > _MOST_FILES:
            raise _too_many(pattern)
    if again:
        name, first = next(iter(again.items()))
        say(f"{name}: the same file as {first}, so it is left out; such names in all: {len(again)}")
    return [Path(file) for file in found.values()]


def _files(pattern: str) -> Iterator[str]:
    for path in (pattern,) if os.path.lexists(pattern) else _without_braces(pattern):
        matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))  # noqa: PTH207  absolute
        if not matches:
            named_by = "" if path == pattern else f" (named by {pattern})"
            raise UserError(f"{path}: no such file{named_by}. Check the path.")
        for match in matches:
            yield from _in_folder(match) if os.path.isdir(match) else (match,)  # noqa: PTH112  never raises


def _without_braces(pattern: str) -> list[str]:
    if "://" in pattern or pattern.startswith("pipe:"):
        raise UserError(f"{pattern}: an address; only files are indexed. Copy the shards, or mount them.")
    try:
        if _count(pattern) > _MOST_FILES:  # the library expands the parts of a pattern before it gives the first name
            raise _too_many(pattern)
        return list(braceexpand(pattern))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{pattern}: wrong braces ({error}). Write them as in {{000..099}} or {{a,b}}.") from error


def _count(pattern: str) -> int:
    """Number of names that a pattern with braces gives, up to one more than are allowed.

    It may be too large where a brace closes before one opens.
    """

    def product(part: str) -> int:
        return min(math.prod(int(count) for count in _COUNTED.findall(part)), _MOST_FILES + 1)

    def counted(braces: re.Match[str]) -> str:
        if numbers := _NUMBERS.match(braces[1]):
            first, last, step = (int(number or 1) for number in numbers.groups())
            count = abs(last - first) // (step or 1) + 1
        elif _LETTERS.match(braces[1]):
            count = len(list(braceexpand(braces[0])))
        else:
            count = sum(product(part) for part in braces[1].split(","))
        return f"\0{min(count, _MOST_FILES + 1)}\0"

    left, found = re.sub(r"\\.", "_", pattern), 1
    while found:
        left, found = _INNERMOST.subn(counted, left)
    return product(left)


def _too_many(pattern: str) -> UserError:
    return UserError(f"{pattern}: more than {_MOST_FILES} files. Index them in several parts.")


def _in_folder(folder: str) -> list[str]:
    found = sorted(
        str(file)
        for file in Path(folder).rglob("*")
        if file.name.lower().endswith(_ENDINGS)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not found:
        raise UserError(f"{folder}: no .tar files in this folder or below it. Check the path.")
    return found

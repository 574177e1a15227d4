"""Finds the images of annotations that exist on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path


def first_stored(root: Path, candidates: Iterable[Sequence[str]]) -> list[str | None]:
    """For each image: the first of its candidate paths (all in one folder) that exists, or None."""

    @cache
    def listing(folder: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(root / folder))  # noqa: PTH208  half the cost of iterdir
        except OSError:
            return frozenset()

    found: list[str | None] = []
    for paths in candidates:
        folder = paths[0].rpartition("/")[0]
        found.append(next((path for path in paths if path.rpartition("/")[2] in listing(folder)), None))
    return found

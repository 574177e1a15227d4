"""Paths of users: names of configurations and networks that come with the package, and what a shell left over."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parent


def or_shipped(path: Path, suffix: str) -> Path:
    """The path; or, where nothing is there, the file that it names in configs/ or networks/ of the package.

    "peclr_rn50", "cards/a100.toml" and "configs/demo.toml" are names, with the suffix ".toml".
    """
    with suppress(OSError, ValueError):  # no name of a file
        if not (path.exists() or path.is_absolute() or ".." in path.parts):
            name = path if path.suffix == suffix else path.with_name(f"{path.name}{suffix}")
            places = (PACKAGE / name, PACKAGE / "configs" / name, PACKAGE / "networks" / name)
            return next((place for place in places if place.is_file()), path)
    return path


def is_left_to_shell(path: str) -> bool:
    """Whether a path begins with ~ or contains $NAME, as in quotes, after "=" or in a file.

    Otherwise a folder named "~" would be made.
    """
    return re.match(r"~|\$\w|.*\$\{", path) is not None and not os.path.lexists(path)

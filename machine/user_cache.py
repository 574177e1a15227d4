"""The folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache."""
    # expanduser never raises; Path.home raises for a user that the system does not know.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111

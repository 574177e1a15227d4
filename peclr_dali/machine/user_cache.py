"""The folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache. A relative one is ignored, as the XDG specification says."""
    # expanduser never raises; Path.home raises for a user that the system does not know.
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache"))  # noqa: PTH111, PTH117

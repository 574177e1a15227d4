"""torchrun starts a failed run again; for bad input that is useless, so ranks that are started again leave at once.

Nothing heavy is imported here, since every command imports it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

LAUNCHER = os.getppid()
"""The process that started this one, asked at once: if it is torchrun it may be gone before the imports are done."""

_PATIENCE_S = 5.0


def refused_before() -> bool:
    """Whether a rank of this host has refused this very input, in this attempt of torchrun's or an earlier one."""
    mark = _mark()
    return mark is not None and mark.exists()


def refuse() -> None:
    """Remember that the input is bad and that this has been reported."""
    mark = _mark()
    if mark is not None:
        with suppress(OSError):  # torchrun is gone, and so is its folder
            mark.touch()


def wait_for_report() -> None:
    """Give the rank that reports the bad input time to do so: torchrun ends it as soon as another rank has left."""
    limit = time.monotonic() + _PATIENCE_S
    while _mark() is not None and not refused_before() and time.monotonic() < limit:
        time.sleep(0.02)


def _mark() -> Path | None:
    """A file that all attempts of this launch of torchrun on this host share; None without torchrun.

    torchrun names a file ATTEMPT/LOCAL_RANK/error.json in a folder of the launch's own, which it removes at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[2] / "bad_input"

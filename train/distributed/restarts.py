"""Ends at once the ranks that torchrun restarts after bad input, since a restart cannot help.

This file does not import torch, since every command imports it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

LAUNCHER = os.getppid()
"""Process that started this one. It is read before the imports: torchrun may end while they run."""

_PATIENCE_S = 5.0


def refused_before() -> bool:
    """Whether a rank of this host has refused this input, in this or an earlier attempt of torchrun."""
    mark = _mark()
    return mark is not None and mark.exists()


def refuse() -> None:
    """Record that the input is bad and that this was reported."""
    mark = _mark()
    if mark is not None:
        with suppress(OSError):  # torchrun has ended and removed its folder
            mark.touch()


def wait_for_report() -> None:
    """Wait until another rank has reported the bad input: when one rank ends, torchrun kills the others."""
    limit = time.monotonic() + _PATIENCE_S
    while _mark() is not None and not refused_before() and time.monotonic() < limit:
        time.sleep(0.02)


def _mark() -> Path | None:
    """A file shared by all attempts of this torchrun on this host; None without torchrun.

    torchrun makes a folder with files ATTEMPT/LOCAL_RANK/error.json for each launch, and removes it at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[2] / "bad_input"

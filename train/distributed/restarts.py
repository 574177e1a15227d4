"""Ends at once the ranks that torchrun restarts after bad input, since a restart cannot help. An outage may pass.

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
_REPORTED = "reported"
"""A file in the folder of an attempt."""
_BAD_INPUT = "bad_input"
"""A file in the folder of all attempts."""


def refused_before() -> bool:
    """Whether a rank of this host has refused this input, in this or an earlier attempt of torchrun."""
    attempt = _attempt()
    return attempt is not None and (attempt.parent / _BAD_INPUT).exists()


def reported(*, restart: bool) -> None:
    """Record that the error of this attempt was reported; without `restart`, later attempts end at once."""
    attempt = _attempt()
    if attempt is not None:
        with suppress(OSError):  # torchrun has ended and removed its folder
            (attempt / _REPORTED).touch()
            if not restart:
                (attempt.parent / _BAD_INPUT).touch()


def wait_for_report() -> None:
    """Wait until another rank has reported the error: when one rank ends, torchrun kills the others."""
    attempt, limit = _attempt(), time.monotonic() + _PATIENCE_S
    while attempt is not None and not (attempt / _REPORTED).exists() and time.monotonic() < limit:
        time.sleep(0.02)


def _attempt() -> Path | None:
    """The folder of this attempt of torchrun on this host; None without torchrun.

    torchrun makes a folder with files ATTEMPT/LOCAL_RANK/error.json for each launch, and removes it at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[1]

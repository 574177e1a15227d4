"""Random numbers as a function of their purpose, not of earlier draws."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np


class Stream(IntEnum):
    """Purpose of a random number. It is part of the generator's key, so that streams are independent."""

    ORDER = 0
    VIEW = 1
    SUBSTITUTE = 2
    PARTNER = 3


MOST_VIEWS: Final = 2**8
"""Largest number of views, and of sources: a view's number has eight bits of the key."""


def philox(seed: int, stream: Stream, *, epoch: int = 0, view: int = 0) -> np.random.Philox:
    """The generator of one stream. Equal arguments give equal numbers on every machine."""
    if not 0 <= view < MOST_VIEWS:
        raise ValueError(f"view {view}; expected one of {MOST_VIEWS}")
    return np.random.Philox(key=[seed, (int(stream) << 48) | (view << 40) | epoch])

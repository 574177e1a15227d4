"""Random numbers as a function of their purpose, not of earlier draws."""

from enum import IntEnum

import numpy as np

from peclr_dali.pipelines.arrays import DoubleArray, IntArray


class Stream(IntEnum):
    """Purpose of a random number. It is part of the generator's key, so that streams are independent."""

    ORDER = 0
    VIEW = 1
    SUBSTITUTE = 2
    PARTNER = 3


MOST_VIEWS = 2**8
"""Largest number of views, and of sources: a view's number has eight bits of the key."""


def philox(seed: int, stream: Stream, *, epoch: int = 0, view: int = 0) -> np.random.Philox:
    """The generator of one stream. Equal arguments give equal numbers on every machine."""
    return np.random.Philox(key=[seed, (int(stream) << 48) | (view << 40) | epoch])


def uniforms(seed: int, stream: Stream, epoch: int, places: IntArray, each: int, *, view: int = 0) -> DoubleArray:
    """Numbers in [0, 1) at `places` (N,) of an epoch: (N, each), `each` a multiple of Philox's block of four.

    The generator is called once for each run of consecutive places; a batch has one or a few runs.
    """
    out = np.empty((len(places), each))
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(places)], strict=True):
        bits = philox(seed, stream, epoch=epoch, view=view)
        bits.advance(int(places[start]) * each // 4)
        np.random.Generator(bits).random(out=out[start:stop])
    return out

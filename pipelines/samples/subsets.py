"""Chooses parts of a dataset by hash, the same on every machine."""

import hashlib
import os
import re
from typing import Literal

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import AnyArray, BoolArray, IntArray
from peclr_dali.pipelines.config import DataConfig

HELD_OUT_FRAC = 0.1
OWN_HELD_OUT = 100
"""Least number of held-out images of a folder or a COCO file, but for more than a fifth of them."""


_KNOWN_TO_ALL = {"part": ("training",), "split": ("all",), "box": ("center", "joints")}


def refuse_key(config: DataConfig, key: Literal["part", "split", "box"], why: str) -> None:
    """Raise a `UserError` if a key of the data has another value than those that all sources know."""
    value, known = getattr(config, key), _KNOWN_TO_ALL[key]
    if value not in known:
        raise UserError(f'data.{key} = {value!r}: {why}. Leave it out, or set data.{key} = "{known[0]}".')


def hash_of_name(name: str) -> int:
    """A hash of a name, 63 bits; crops of one frame have that of the frame, as tools/find_boxes.py names them."""
    frame = re.sub(r"(\.\w+)_[-.\d]+_[-.\d]+\.jpg$", r"\1", name)
    return int.from_bytes(hashlib.blake2b(os.fsencode(frame), digest_size=8).digest(), "big") >> 1


def mixed_bits(numbers: AnyArray) -> AnyArray:
    """SplitMix64's output for each state: a bijective hash of 64 bits."""
    bits = numbers * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def rows_of_split(group: IntArray, split: Literal["all", "train", "val"], *, least: int = 0) -> IntArray:
    """Rows of a split, ascending. "val" has the tenth of the groups whose numbers have the smallest hashes.

    Args:
        group: (N,) number of the group of each sample; a group stays together.
        least: number of groups that "val" has at least, but for more than a fifth of them.
    """
    if split == "all":
        return np.arange(len(group))
    numbers, member_of = np.unique(group, return_inverse=True)
    count = round(max(len(numbers) * HELD_OUT_FRAC, min(len(numbers) * 0.2, least)))
    kept = _smallest(numbers.astype(np.uint64) + np.uint64(1), count)[member_of]
    return np.flatnonzero(kept if split == "val" else ~kept)


def in_fraction(group: IntArray, fraction: float, *, seed: int) -> BoolArray:
    """Mask (N,) of the samples in a random `fraction` of the groups.

    With the same seed, a smaller fraction is a subset of a larger one. Groups are taken in the order of a hash of their
    number, so the order of two groups does not depend on the others.

    Args:
        group: (N,) number of the group of each sample; a group stays together.
        fraction: in (0, 1]; round(fraction * G) of G groups are taken, at least one.
    """
    numbers, member_of = np.unique(group, return_inverse=True)
    key = mixed_bits(np.array([seed + 1], np.uint64))
    return _smallest(numbers.astype(np.uint64) ^ key, max(1, round(fraction * len(numbers))))[member_of]


def _smallest(states: AnyArray, count: int) -> BoolArray:
    """Mask of the `count` states with the smallest hashes."""
    taken = np.zeros(len(states), bool)
    taken[np.argsort(mixed_bits(states), kind="stable")[:count]] = True
    return taken

"""Mutated files among good ones through the whole loader, in a process of its own, since a decoder may end it.

    python -m tests.pipelines.loader_fuzz --mutated 10000 --good 1000 --backend opencv

Prints one line of JSON with the counts; a crash is this process's exit by a signal. Asserted on the way: every good
file stands where the order says, with the pixels that it has in a loader without bad files; every mutated file is
either used there, or in the quarantine with a reason and replaced by the substitute that its position gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.hardware import describe_machine
from pipelines.config import PipelinesConfig
from pipelines.draws import ColourConfig, GeometryConfig
from pipelines.feed import SUBSTITUTE_ATTEMPTS, Quarantine
from pipelines.loader import Loader
from pipelines.order import EpochOrder, RankSlice
from pipelines.sources.folder import load_folder
from tests.pipelines.decoder_fuzz import encoded, good_files, mutated, smooth_picture

STILL = GeometryConfig(side_px=16, rotation_deg=(0, 0), translation_frac=0, scale=(1, 1))
KINDS = ("JPEG", "PNG", "WEBP")
LARGE_PX = (800, 600)
"""Width and height."""


def write_files(root: Path, *, count: int, good: int, seed: int, large: bool) -> None:
    """`good` files of three kinds, and `count` mutated ones, every twentieth of them random bytes."""
    rng = np.random.default_rng(seed)
    width, height = LARGE_PX if large else (40, 40)
    for number in range(good):
        kind = KINDS[number % 3]
        data = encoded(smooth_picture(width, height, seed=number), kind)
        (root / f"good_{number:05}.{kind.lower()}").write_bytes(data)
    originals = list(good_files(smooth_picture(width, height) if large else None).items())
    for number in range(count):
        (name, one), (_, other) = (originals[place] for place in rng.integers(0, len(originals), 2))
        kind = name.split()[0]
        data = rng.bytes(int(rng.integers(0, 3000))) if number % 20 == 0 else mutated(one, rng, other)
        (root / f"mutated_{number:05}.{kind}").write_bytes(data)


def one_epoch(
    root: Path, backend: Any, batch: int, *, large: bool
) -> tuple[list[str], np.ndarray, dict[int, torch.Tensor], Quarantine]:
    """Names, samples (N,) in the order of positions, the first view of each sample, and what was refused."""
    index = load_folder(root)
    if large:  # hands in the middle, so that only regions are decoded
        box_px = np.tile(np.array([LARGE_PX[0] / 2, LARGE_PX[1] / 2, 200], np.float32), (len(index), 1))
        index = dataclasses.replace(index, box_px=box_px)
    steps = -(-len(index) // batch)
    order = EpochOrder(len(index), len(index), seed=1)
    samples: list[np.ndarray] = []
    images: dict[int, torch.Tensor] = {}
    pipelines = PipelinesConfig(backend=backend, batch=64, threads=2, decode="region" if large else "whole")
    with Loader(
        index, order, RankSlice(batch, 0, batch), pipelines, STILL, ColourConfig(jitter="none"),
        seed=1, device=torch.device("cpu"), last_step=steps, quarantine=Quarantine(quiet=True),
    ) as loader:  # fmt: skip
        for made in loader:
            samples.append(made.samples.numpy())
            images |= {int(row): made.views[0].image[at].clone() for at, row in enumerate(made.samples)}
    return list(index.paths), np.concatenate(samples)[: len(index)], images, loader.quarantine


def account(root: Path, backend: Any, batch: int, *, large: bool) -> dict[str, int]:
    """Run, assert, count."""
    names, samples, images, quarantine = one_epoch(root, backend, batch, large=large)
    reasons = quarantine.reasons
    order = EpochOrder(len(names), len(names), seed=1)
    wanted = order.samples(0, np.arange(len(names)))
    is_good = np.array([name.startswith("good") for name in names])
    bad = np.isin(wanted, list(reasons))
    assert all(reasons.values())
    assert not is_good[list(reasons)].any()
    np.testing.assert_array_equal(samples[~bad], wanted[~bad])
    for position in np.flatnonzero(bad):
        stands_in = order.substitutes(0, int(position), SUBSTITUTE_ATTEMPTS)
        assert samples[position] == next(row for row in stands_in if row not in reasons)
    with tempfile.TemporaryDirectory() as folder:
        for name in np.array(names)[is_good]:
            (Path(folder) / name).hardlink_to(root / name)
        alone, _, expected, none_bad = one_epoch(Path(folder), backend, min(batch, int(is_good.sum())), large=large)
    assert len(none_bad) == 0
    for row, name in enumerate(alone):
        assert torch.equal(images[names.index(name)], expected[row])
    kinds = Counter(reason.split()[0] for reason in reasons.values())
    undecodable = sum(reason == "its compressed data does not decode" for reason in reasons.values())
    return {
        "good": int(is_good.sum()),
        "good_used_in_place": int((is_good[wanted] & (samples == wanted)).sum()),
        "mutated": int((~is_good).sum()),
        "mutated_used": int((~is_good[wanted] & (samples == wanted)).sum()),
        "refused_by_structure": len(reasons) - undecodable,
        "refused_by_decoder": undecodable,
        **{f"refused_{kind}": count for kind, count in kinds.items() if kind in ("JPEG", "PNG", "WebP")},
    }


def main() -> None:
    """Fuzz, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutated", type=int, default=10_000)
    parser.add_argument("--good", type=int, default=1_000)
    parser.add_argument("--backend", choices=["dali", "opencv"], default="opencv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--large", action="store_true", help="images of which only regions are decoded")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        folder_of = Path(folder)
        write_files(folder_of, count=arguments.mutated, good=arguments.good, seed=arguments.seed, large=arguments.large)
        counts = account(folder_of, arguments.backend, arguments.batch, large=arguments.large)
    row = {
        "bench": "mutated files",
        "machine": describe_machine(),
        "backend": arguments.backend,
        "seed": arguments.seed,
        "regions": arguments.large,
        **counts,
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()

"""Mutated files among good ones through the whole loader, compared with independent decoders.

    python -m tests.pipelines.loader_fuzz --files 20000 --seed 0

Every third file is good. Each part of the files runs in a process of its own, by both renderers, with images decoded
whole and in regions. Prints the faults, each with the number of its file, then one line of JSON with the counts.

A view has no rotation, no scaling and no colour jitter, and is shifted at random, so that it shows where it stands in
the order. The comparison run has the same names, with a good file in the place of every mutated one.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.pipelines.loader.prepare import SUBSTITUTE_ATTEMPTS, Quarantine
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from tests.pipelines.harness import NO_COLOUR, index_of, load
from tests.pipelines.mutations import Made, good_file, mutated_file
from tests.pipelines.second_opinion import Opinion, judge, opinion_of

STILL: Final = GeometryConfig(side_px=48, rotation_deg=(0, 0), translation_frac=0.06, scale=(1, 1))
HALVES: Final = {"whole": False, "region": True}
"""Whether views that minify are made of a halved image."""
RUNS: Final = (("dali", "whole"), ("cpu", "whole"), ("dali", "region"), ("cpu", "region"))
FAULTS: Final = ("ended", "garbled", "wrong_matrix", "good_lost", "good_changed", "wrong_substitute")
"""What must not be found."""


def run_loader(
    root: Path, order: EpochOrder, renderer: str, decode: str, box_px: npt.NDArray[np.float64]
) -> tuple[list[tuple[int, list[list[Any]]]], dict[int, str]]:
    """All files of a folder through the loader, in the order of their names.

    Returns:
        Of each place, the file that stands there, and of each view: pixels, source-to-view matrix and shift; and the
        reasons why files were refused.
    """
    index = dataclasses.replace(index_of(root), box_px=box_px.astype(np.float32))
    still, quarantine, rows = dataclasses.replace(STILL, antialias=HALVES[decode]), Quarantine(), min(96, len(index))
    batches = load(
        index, Augmentation(still, NO_COLOUR), batch=rows, order=order, last=-(-len(index) // rows),
        chunk=16, quarantine=quarantine, views=renderer, decode=decode,
    )  # fmt: skip
    made = [
        (sample, [[view.image[row].permute(1, 2, 0).numpy(), view.source_to_view_px[row].double().numpy(),
                   view.matrix[row, :, 2].double().numpy()] for view in batch.views])
        for batch in batches
        for row, sample in enumerate(batch.samples[:, 0].tolist())
    ]  # fmt: skip
    return made[: len(index)], quarantine.reasons


def account(seed: int, first: int, stop: int) -> Counter[str]:
    """Write the mutated files of some numbers with good ones between them, run them, compare and count."""
    counts, files = Counter(files=stop - first), list[tuple[int, bool, Made]]()
    for number in range(first, stop):
        if number % 2 == 0:
            files.append((number, True, good_file(np.random.default_rng([seed, number, 0]))))
        files.append((number, False, mutated_file(np.random.default_rng([seed, number, 1]))))
    rng, sizes_px = np.random.default_rng([seed, first, 2]), np.array([made.shown_px for *_, made in files])
    parts = rng.uniform((0.3, 0.3, 0.2), (0.7, 0.7, 0.45), (len(files), 3))
    boxes_px = {"whole": np.zeros_like(parts), "region": parts * np.column_stack([sizes_px, sizes_px.max(axis=1)])}
    order, opinions = EpochOrder(len(files), len(files), seed=1, fixed=np.arange(len(files))), dict[int, Opinion]()

    def found(what: str, row: int, *where: object) -> None:
        counts[what] += 1
        if what in FAULTS:
            print(what, f"seed {seed}, file {files[row][0]}, {files[row][2].what}:", *where, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        mixed, comparison, plain = Path(folder, "mixed"), Path(folder, "comparison"), Path(folder, "plain")
        mixed.mkdir()
        comparison.mkdir()
        plain.write_bytes(good_file(rng).data)
        for row, (_, good, made) in enumerate(files):
            (mixed / f"{row:05}.jpg").write_bytes(made.data)
            (comparison / f"{row:05}.jpg").hardlink_to(mixed / f"{row:05}.jpg" if good else plain)
        for renderer, decode in RUNS:
            made_of, reasons = run_loader(mixed, order, renderer, decode, boxes_px[decode])
            of_good, _ = run_loader(comparison, order, renderer, decode, boxes_px[decode])
            for row, ((sample, views), (_, same)) in enumerate(zip(made_of, of_good, strict=True)):
                substitutes = order.substitutes(0, row, SUBSTITUTE_ATTEMPTS).tolist()
                good = files[row][1]
                if good and sample != row:
                    found("good_lost", row, renderer, decode, reasons.get(row))
                elif good and any(not np.array_equal(one[0], other[0]) for one, other in zip(views, same, strict=True)):
                    found("good_changed", row, renderer, decode)
                elif sample != next((other for other in [row, *substitutes] if other not in reasons), None):
                    found("wrong_substitute", row, renderer, decode, sample)
                opinion = opinions[sample] = opinions.get(sample) or opinion_of(files[sample][2].data)
                box_px = boxes_px[decode][sample].astype(np.float32)
                for pixels, matrix_px, shift_frac in views:
                    verdict = judge(opinion, pixels, matrix_px, box_px, shift_frac, halves=HALVES[decode])
                    found(verdict, sample, renderer, decode)
            by_decoder = sum(reason == "its compressed data does not decode" for reason in reasons.values())
            counts[f"used_{renderer}_{decode}"] = stop - first - len(reasons)
            counts[f"refused_by_check_{renderer}_{decode}"] = len(reasons) - by_decoder
            counts[f"refused_by_decoder_{renderer}_{decode}"] = by_decoder
    return counts


def run_part(seed: int, first: int, stop: int) -> Counter[str]:
    """`account` in a process of its own; one that crashes, raises or hangs is a fault."""
    command = [sys.executable, "-m", "tests.pipelines.loader_fuzz", "--seed", str(seed), "--child", f"{first},{stop}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300 + 2 * (stop - first))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"ended: seed {seed}, files {first} to {stop}: {error}\n{str(error.stderr)[-2000:]}", flush=True)
        return Counter(files=stop - first, ended=1)
    *faults, counts = ran.stdout.splitlines()
    print(*faults, sep="\n", end="\n" * bool(faults), flush=True)
    return Counter(json.loads(counts))


def main() -> None:
    """Fuzz, print the faults and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=500, help="mutated files in a process")
    parser.add_argument("--child", help="of this program's own: the numbers of its files")
    arguments = parser.parse_args()
    if arguments.child:
        cv2.setNumThreads(1)
        torch.set_num_threads(1)
        print(json.dumps(account(arguments.seed, *map(int, arguments.child.split(",")))))
        return
    counts = Counter[str]()
    for first, stop in itertools.pairwise([*range(0, arguments.files, arguments.part), arguments.files]):
        counts += run_part(arguments.seed, first, stop)
    print(json.dumps({"seed": arguments.seed, **dict.fromkeys(FAULTS, 0), **counts}))


if __name__ == "__main__":
    main()

"""Mutated files among good ones through the whole loader, compared with independent decoders.

    python -m tests.pipelines.loader_fuzz --files 20000 --seed 0 --findings findings.jsonl
    python -m tests.pipelines.loader_fuzz --seed 0 --write 417 --to here.png

Every third file is good. Each part of the files runs in a process of its own, by both renderers, with images decoded
whole and in regions. A process that crashes, raises or hangs is run again with each half of its files, down to the file
that does it. Prints one line of JSON with the counts; the findings go to a file, each with the number of its file.

A view has no rotation, no scaling and no colour jitter, and is shifted at random, so that it shows where it stands in
the order. The comparison run has the same names, with a good file in the place of every mutated one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.loader.read import SUBSTITUTE_ATTEMPTS, Quarantine
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE
from peclr_dali.pipelines.samples.order import EpochOrder, RankSlice, Schedule
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from tests.pipelines.mutations import Made, good_file, mutated_file
from tests.pipelines.second_opinion import MAX_LEVELS, MEAN_LEVELS, Verdict, judge, opinion_of

ROOT: Final = Path(__file__).parents[2]
STILL: Final = GeometryConfig(side_px=48, rotation_deg=(0, 0), translation_frac=0.06, scale=(1, 1))
HALVES: Final = {"whole": False, "region": True}
"""Whether views that minify are made of a halved image."""
ROWS: Final = 96
"""Of a training batch."""

RUNS: Final[tuple[tuple[Literal["dali", "cpu"], Literal["whole", "region"]], ...]] = (
    ("dali", "whole"), ("cpu", "whole"), ("dali", "region"), ("cpu", "region"),
)  # fmt: skip
CHILD: Final = (sys.executable, "-m", "tests.pipelines.loader_fuzz")
FAULTS: Final = (
    "crash", "hang", "error", Verdict.GARBLED, Verdict.WRONG_MATRIX, "good_lost", "good_changed", "wrong_substitute",
)  # fmt: skip
"""What must not be found."""

Finding = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One pass over all files, in the order of their names.

    Attributes:
        samples: (N,) which file stands at each place.
        views: (N, V, S, S, 3) uint8.
        shift_frac: (N, V, 2) in x and y, as a fraction of the view's side.
        matrix_px: (N, V, 2, 3) source to view.
        reasons: why files were refused.
    """

    samples: npt.NDArray[np.int64]
    views: npt.NDArray[np.uint8]
    shift_frac: npt.NDArray[np.float64]
    matrix_px: npt.NDArray[np.float64]
    reasons: dict[int, str]


def in_order(count: int) -> EpochOrder:
    return EpochOrder(count, count, seed=1, fixed=np.arange(count))


def run_loader(
    root: Path, renderer: Literal["dali", "cpu"], decode: Literal["whole", "region"], box_px: npt.NDArray[np.float32]
) -> Run:
    """All files of a folder through the loader."""
    index = dataclasses.replace(load_folder(DataConfig("folder", str(root))), box_px=box_px)
    rows = min(ROWS, len(index))
    with Loader(
        index,
        Schedule(in_order(len(index)), RankSlice(rows, 0, rows), last_step=-(-len(index) // rows)),
        PipelinesConfig(views=renderer, batch=16, threads=2, decode=decode),
        Augmentation(replace(STILL, antialias=HALVES[decode]), ColourConfig(jitter="none")),
        device=torch.device("cpu"),
        quarantine=Quarantine(),
    ) as loader:
        samples, views, shifts, matrices = zip(*(
            (
                made.samples[:, 0].numpy(),
                np.stack([view.image.permute(0, 2, 3, 1).numpy() for view in made.views], axis=1),  # copies
                np.stack([view.matrix[:, :, 2].numpy() for view in made.views], axis=1),
                np.stack([view.source_to_view_px.numpy() for view in made.views], axis=1),
            )
            for made in loader
        ), strict=True)  # fmt: skip
    return Run(
        np.concatenate(samples)[: len(index)],
        np.concatenate(views)[: len(index)],
        np.concatenate(shifts).astype(np.float64)[: len(index)],
        np.concatenate(matrices).astype(np.float64)[: len(index)],
        loader.quarantine.reasons,
    )


def box_of(made: Made, rng: np.random.Generator) -> tuple[float, float, float]:
    """A box over a part of an image."""
    width, height = made.shown_px
    x, y, side = rng.uniform((0.3, 0.3, 0.2), (0.7, 0.7, 0.45))
    return width * x, height * y, max(width, height) * side


def account(folder: Path, seed: int, numbers: Sequence[int]) -> tuple[Counter[str], list[Finding]]:
    """Write the mutated files of these numbers with good ones between them, run them, compare and count."""
    mixed, comparison = folder / "mixed", folder / "comparison"
    files: list[tuple[int, bool, Made]] = []
    for place, number in enumerate(numbers):
        if place % 2 == 0:
            files.append((number, True, good_file(seed, number)))
        files.append((number, False, mutated_file(seed, number)))
    mixed.mkdir()
    comparison.mkdir()
    plain = folder / "plain"
    plain.write_bytes(good_file(seed, 0).data)
    for row, (_, good, made) in enumerate(files):
        name = f"{row:05}.{made.kind}"
        (mixed / name).write_bytes(made.data)
        (comparison / name).hardlink_to(mixed / name if good else plain)
    counts = Counter(files=len(numbers), good=sum(good for _, good, _ in files))
    counts["mutated_in_metadata"] = sum(number % 2 == 0 for number in numbers)
    findings: list[Finding] = []

    def found(what: str, row: int, renderer: str, decode: str, **facts: Any) -> None:
        number, good, made = files[row]
        findings.append({
            "found": what, "seed": seed, "number": number, "good": good, "views": renderer, "decode": decode,
            "file": made.what, **facts,
        })  # fmt: skip

    parts_px = np.array([box_of(made, np.random.default_rng([seed, number, 2])) for number, _, made in files])
    boxes_px = {"whole": np.tile(np.array(WHOLE_IMAGE), (len(files), 1)), "region": parts_px}
    runs: list[Run] = []
    is_good = np.array([good for _, good, _ in files])
    order = in_order(len(files))
    for renderer, decode in RUNS:
        print(f"stage: {renderer} {decode}", file=sys.stderr, flush=True)
        box_px = boxes_px[decode].astype(np.float32)
        run = run_loader(mixed, renderer, decode, box_px)
        print(f"stage: {renderer} {decode} of good files", file=sys.stderr, flush=True)
        run_of_good = run_loader(comparison, renderer, decode, box_px)
        runs.append(run)
        for row in np.flatnonzero(is_good).tolist():
            if run.samples[row] != row:
                found("good_lost", row, renderer, decode, reason=run.reasons.get(row))
            elif not np.array_equal(run.views[row], run_of_good.views[row]):
                levels = int(np.abs(run.views[row].astype(np.int16) - run_of_good.views[row]).max())
                found("good_changed", row, renderer, decode, max_levels=levels)
        for row in np.flatnonzero(~is_good).tolist():
            substitutes = order.substitutes(0, row, SUBSTITUTE_ATTEMPTS).tolist() if row in run.reasons else [row]
            if run.samples[row] != next((other for other in substitutes if other not in run.reasons), None):
                found("wrong_substitute", row, renderer, decode, used=int(run.samples[row]))
        by_decoder = sum(reason == "its compressed data does not decode" for reason in run.reasons.values())
        counts[f"used_{renderer}_{decode}"] += int((~is_good).sum()) - len(run.reasons)
        counts[f"refused_by_check_{renderer}_{decode}"] += len(run.reasons) - by_decoder
        counts[f"refused_by_decoder_{renderer}_{decode}"] += by_decoder
    print("stage: judging", file=sys.stderr, flush=True)
    for row, (_, good, made) in enumerate(files):
        _judge_file(row, good, made, runs, boxes_px, counts, found)
    return counts, findings


def _judge_file(
    row: int, good: bool, made: Made, runs: list[Run], boxes_px: dict[str, Any], counts: Counter[str], found: Any
) -> None:
    """Compare all views of a file, of all runs, wherever it stands."""
    opinion = None
    for (renderer, decode), run in zip(RUNS, runs, strict=True):
        for place in np.flatnonzero(run.samples == row):
            opinion = opinion or opinion_of(made.data)
            box_px = boxes_px[decode][row].astype(np.float32)
            judged = [
                judge(opinion, view, matrix_px, box_px, shift_frac, halves=HALVES[decode])
                for view, matrix_px, shift_frac in zip(
                    run.views[place], run.matrix_px[place], run.shift_frac[place], strict=True
                )
            ]
            worst = max(judged, key=lambda one: (one.verdict in FAULTS, one.mean_levels))
            counts[f"views_{worst.verdict}"] += len(judged)
            if worst.verdict == Verdict.SAME:
                counts["tenths_of_max_levels"] = max(counts["tenths_of_max_levels"], round(10 * worst.max_levels))
                counts["tenths_of_mean_levels"] = max(counts["tenths_of_mean_levels"], round(10 * worst.mean_levels))
            else:
                found(worst.verdict, row, renderer, decode, place=int(place), mean_levels=round(worst.mean_levels, 2),
                      max_levels=round(worst.max_levels, 1), turned_by=worst.turned_by)  # fmt: skip


def run_part(seed: int, numbers: Sequence[int]) -> tuple[Counter[str], list[Finding]]:
    """`account` in a process of its own. What ends that process is a finding; a smaller `--part` narrows it down."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log.txt"
        command = [*CHILD, "--seed", str(seed), "--child", str(out)]
        limit_s = 300 + 2 * len(numbers)
        with log.open("wb") as stream:
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=stream, stderr=stream,
                env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                child.communicate(json.dumps(list(numbers)).encode(), timeout=limit_s)
                what = {0: "", 1: "error"}.get(child.returncode, "crash")
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                what = "hang"
        if not what:
            counts, findings = json.loads(out.read_text())
            return Counter(counts), findings
        lines = log.read_text(errors="replace").splitlines()
        stage = next((line for line in reversed(lines) if line.startswith("stage: ")), "stage: writing files")
        last = next((line for line in reversed(lines) if line.strip()), "")[:200]
    end = {
        "found": what, "seed": seed, "number": numbers[0], "last_number": numbers[-1], "exit": child.returncode,
        "stage": stage.removeprefix("stage: "), "last_line": last,
    }  # fmt: skip
    print(json.dumps(end), file=sys.stderr, flush=True)
    return Counter(files=len(numbers)), [end]


def _added(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """Sums, and the maxima of what is one."""
    out = one + other
    for name in ("tenths_of_max_levels", "tenths_of_mean_levels"):
        out[name] = max(one[name], other[name])
    return out


def row_of(counts: Counter[str], findings: Sequence[Finding], seed: int, seconds: float) -> dict[str, Any]:
    """The row of results."""
    faults = Counter(str(finding["found"]) for finding in findings)
    plain = {name: count for name, count in sorted(counts.items()) if not name.startswith("tenths")}
    return {
        "seed": seed,
        **plain,
        **{str(fault): faults[fault] for fault in FAULTS},
        "faulty_files": len({finding["number"] for finding in findings if finding["found"] in FAULTS}),
        "largest_mean_levels": counts["tenths_of_mean_levels"] / 10,
        "largest_max_levels": counts["tenths_of_max_levels"] / 10,
        "tolerance_levels": {"mean": MEAN_LEVELS, "max": MAX_LEVELS},
        "seconds": round(seconds),
    }


def run(files: int, seed: int, *, part: int, jobs: int = 1, to: Path | None = None) -> dict[str, Any]:
    """The files 0 to `files` - 1 of a seed in parts; the row of results. Findings are appended to a file."""
    start = time.perf_counter()
    counts, findings = Counter[str](), list[Finding]()
    parts = [range(first, min(first + part, files)) for first in range(0, files, part)]
    with ThreadPoolExecutor(jobs) as pool:
        for some, more in pool.map(lambda numbers: run_part(seed, numbers), parts):
            counts = _added(counts, some)
            findings += more
            if to is not None:
                with to.open("a") as file:
                    file.writelines(json.dumps(finding) + "\n" for finding in more)
            print(f"{counts['files']} of {files}, {len(findings)} findings", file=sys.stderr, flush=True)
    return row_of(counts, findings, seed, time.perf_counter() - start)


def main() -> None:
    """Fuzz and print the counts, or write one file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=500, help="mutated files in a process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--findings", type=Path, help="append what is found, a line of JSON each")
    parser.add_argument("--child", type=Path, help="of this program's own: where counts and findings go")
    parser.add_argument("--write", type=int, help="write the mutated file of this number and end")
    parser.add_argument("--to", type=Path, default=Path("mutated"))
    arguments = parser.parse_args()
    if arguments.write is not None:
        made = mutated_file(arguments.seed, arguments.write)
        arguments.to.write_bytes(made.data)
        print(made.what)
    elif arguments.child is not None:
        logging.basicConfig(stream=sys.stderr)
        cv2.setNumThreads(1)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            result = account(Path(folder), arguments.seed, json.load(sys.stdin))
        arguments.child.write_text(json.dumps(result))
    else:
        print(json.dumps(run(
            arguments.files, arguments.seed, part=arguments.part, jobs=arguments.jobs, to=arguments.findings
        )))  # fmt: skip


if __name__ == "__main__":
    main()

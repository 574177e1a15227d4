"""`bench-gpu`: checks claims about a GPU in independent stages, each in a separate process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import set_num_threads

from bench.gpu import program_stages
from bench.gpu.claims import Claim, Findings, Job
from bench.gpu.measured_stages import loader, memory, step, views
from bench.rows import append, describe_machine, read_rows, yes_or_no
from errors.terminal import in_one_line
from synthetic import make_dataset
from train.runs.log import configure_logging

STAGES: Final[dict[str, tuple[Callable[[Job], Findings], float]]] = {
    "tests": (program_stages.run_tests, 300),
    "loader": (partial(loader, sources="small", repeats=3), 300),
    "loader-large": (partial(loader, sources="large", repeats=2), 300),
    "views": (partial(views, repeats=3), 180),
    "step-resnet50": (partial(step, file="peclr_rn50.toml", repeats=3), 300),
    "step-resnet152": (partial(step, file="peclr_rn152.toml", repeats=2), 400),  # long steps and compilations
    "memory-11gb": (partial(memory, encoder="peclr_rn50.toml", overlay="rtx_11gb.toml", card_bytes=11e9), 120),
    "memory-24gb": (partial(memory, encoder="peclr_rn152.toml", overlay="rtx_24gb.toml", card_bytes=24e9), 180),
    "run": (program_stages.real_run, 590),
}
"""Name -> function and the seconds after which the stage is killed. The most important stage comes first."""

_START: Final = "spawn"  # how a stage's process starts
_ITSELF: Final = "the stage itself"

_DRY_LIMITS: Final = 10
"""Factor of the stages' limits in a dry run, since other work on its cores may slow it down."""


def prove(names: Sequence[str], job: Job) -> bool:
    """Run stages, one after the other, and print a table of their claims.

    Each stage appends a row to gpu.jsonl in the job's folder when it ends. Its measurements go to other files there. A
    dry run makes its own images first.

    Returns:
        Whether every claim that could be checked holds. In a dry run: whether every stage ended without an error.
    """
    if job.tiny:
        make_dataset(job.data, poses=24, seed=0, scenes=2)
    # SIGTERM then ends this process through `finally`, which ends the stage too.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        rows = []
        for name in names:
            stage, limit_s = STAGES[name]
            rows.append(prove_stage(name, stage, limit_s * (_DRY_LIMITS if job.tiny else 1), job))
    finally:
        signal.signal(signal.SIGTERM, before)
    Console(width=max(Console().width, 140)).print(as_table(rows, dry=job.tiny))
    claims = [claim for row in rows for claim in row["claims"]]
    return all(claim["holds"] is not False for claim in claims if not job.tiny or claim["what"] == _ITSELF)


def prove_stage(name: str, stage: Callable[[Job], Findings], limit_s: float, job: Job) -> dict[str, Any]:
    """Run one stage in a fresh process, so that its memory is not counted for the next stage. Returns its row."""
    click.echo(f"stage {name}", err=True)
    before, began = len(_rows(job)), time.perf_counter()
    process = multiprocessing.get_context(_START).Process(target=_run, args=(name, stage, job))
    process.start()
    try:
        process.join(limit_s)
        late = process.is_alive()
    finally:  # Ctrl-C does not reach it
        _end(process)
    if late:
        _write(job, name, began, _failed(f"not done after {limit_s:g} s"))
    elif len(_rows(job)) == before:
        _write(job, name, began, _failed(f"its process ended with {process.exitcode}"))
    return _rows(job)[-1]


def _end(process: BaseProcess) -> None:
    """Kill a process and the processes that it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # the process has ended, or had no group of its own yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _rows(job: Job) -> list[dict[str, Any]]:
    file = job.out / "gpu.jsonl"
    return read_rows(file) if file.exists() else []


def _run(name: str, stage: Callable[[Job], Findings], job: Job) -> None:
    os.setsid()  # a new process group, so that `_end` reaches all processes of the stage
    configure_logging()
    if job.tiny:
        set_num_threads(1)  # more would only wait for each other on a busy machine
    began = time.perf_counter()
    try:
        found = stage(job)
    except Exception as error:  # the other stages still run
        traceback.print_exc()
        found = _failed(in_one_line(error))
    _write(job, name, began, found)


def _failed(told: str) -> Findings:
    return {"claims": [Claim(_ITSELF, told, "to end", False)]}


def _write(job: Job, name: str, began: float, found: Findings) -> None:
    row = {
        "bench": "gpu",
        "stage": name,
        "dry_run": job.tiny,
        "machine": describe_machine(),
        "seconds": round(time.perf_counter() - began, 1),
        **found,
        "claims": [asdict(claim) for claim in found["claims"]],
    }
    append(job.out / "gpu.jsonl", row)


def as_table(rows: Sequence[dict[str, Any]], *, dry: bool) -> Table:
    """A table with a line for each claim of each stage."""
    title = "dry run at toy size: its figures mean nothing" if dry else rows[0]["machine"]["gpu"]
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("stage", "s", "what", "found", "wanted", "holds"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        for number, claim in enumerate(row["claims"]):
            first = [row["stage"], f"{row['seconds']:.0f}"] if number == 0 else ["", ""]
            shown = not dry or claim["what"] == _ITSELF
            table.add_row(
                *first, claim["what"], claim["found"], claim["wanted"], yes_or_no(claim["holds"]) if shown else ""
            )
    return table

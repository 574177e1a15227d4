"""Records a few steps of a run with torch's profiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from train.runs.folder import RunFolder
from writing import write_text

log = logging.getLogger(__name__)

_WARM_UP = 5
_ROWS = 40


@contextmanager
def profiled(folder: RunFolder, steps: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """A function to call after each step: once `steps` have followed the warm-up, their trace is written.

    A run that ends before leaves a trace of the steps that there were. A run's folder that has one is left as it is.

    Args:
        folder: gets trace.json.gz, for chrome://tracing or Perfetto, and profile.txt, a table of the operators that
            took longest. A warning tells of what cannot be written.
        steps: to record; 0 for none.
        device: of the steps.
    """
    if steps == 0 or folder.profile_file.exists():
        yield lambda: None
        return

    def write(recorded: profile) -> None:
        if recorded.step_num <= _WARM_UP:  # the run ends here
            return
        try:
            part = folder.root / "trace.part.json.gz"  # by this ending torch compresses
            recorded.export_chrome_trace(str(part))
            part.replace(folder.root / "trace.json.gz")
            table = recorded.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=_ROWS)
            write_text(folder.profile_file, f"{table}\n")
        except OSError as error:
            log.warning("run.profile_steps = %d: no trace could be written: %s", steps, error)
        else:
            log.info("%s and trace.json.gz beside it tell of the profiled steps", folder.profile_file)

    kind = device.type
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if kind == "cuda" else [ProfilerActivity.CPU]
    if kind == "cpu":  # the profiler's library then prints an error without a GPU, which it looks for nevertheless
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # nothing; it reads this at its first use
    plan = schedule(wait=_WARM_UP - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, acc_events=True) as recording:
        yield recording.step

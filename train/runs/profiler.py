"""Records a few steps of a run with torch's profiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.writing import write_text

log = logging.getLogger(__name__)

_WARM_UP = 5
_ROWS = 40


@contextmanager
def profiled(folder: RunFolder, steps: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. It records `steps` steps after the warm-up and writes their trace.

    If the run ends earlier, the trace has the steps recorded so far. An existing trace is kept, and nothing is
    recorded.

    Args:
        folder: gets trace.json.gz, for chrome://tracing or Perfetto, and profile.txt, a table of the operators that
            took longest. A file that cannot be written gives a warning.
        steps: number of steps to record; 0: none.
        device: device of the steps.
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
            log.info("profiled steps: see %s and trace.json.gz beside it", folder.profile_file)

    kind = device.type
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if kind == "cuda" else [ProfilerActivity.CPU]
    if kind == "cpu":  # the profiler's library then prints an error without a GPU, which it looks for nevertheless
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # nothing; it reads this at its first use
    plan = schedule(wait=_WARM_UP - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, acc_events=True) as recording:
        yield recording.step

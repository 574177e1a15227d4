"""A rank whose torchrun is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

RANK = """
import signal, time
from peclr_dali.train.distributed.interrupt import StopSignals, stop_with_torchrun
stop_with_torchrun()
with StopSignals() as stop:
    print("started", flush=True)
    while not stop.signal_number:
        time.sleep(0.05)
import sys
sys.stderr.write(f"stopped by {signal.Signals(stop.signal_number).name}")
"""

LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
"""


def test_a_rank_is_stopped_when_its_launcher_ends() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        cwd=ROOT,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "test"},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, printed = rank.communicate(timeout=300)  # until the rank, which holds the pipe, has left
    assert printed == "stopped by SIGTERM"

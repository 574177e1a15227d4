"""A rank whose launcher is gone before the rank has begun to watch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

RANK = """
import os, sys, time
from train.distributed.restarts import LAUNCHER
print("started", flush=True)
while os.getppid() == LAUNCHER:  # torchrun is killed while the rank imports
    time.sleep(0.05)
from train.distributed.launcher import leaving_with_launcher
with leaving_with_launcher():
    time.sleep(600)
"""

LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
"""


def test_a_launcher_that_is_gone_before_the_watch_begins_is_noticed() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        cwd=ROOT,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "test", "RANK": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = rank.communicate(timeout=300)  # until the rank, which holds the pipe, has left
    assert "which started this run, has ended: saving and stopping" in said

"""Stops ranks whose torchrun has ended. Otherwise they could write into the folder of a run that was started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from train.distributed.restarts import LAUNCHER
from train.distributed.watchdog import EXIT_CODE

log = logging.getLogger(__name__)

_GRACE_S = 15.0
"""Seconds for the current step and a checkpoint after torchrun has ended."""


@contextmanager
def leaving_with_launcher() -> Iterator[None]:
    """If torchrun started this rank, watch torchrun. When it has ended, save and stop as on SIGTERM.

    A rank that cannot stop, because it waits for another, is killed after some seconds.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(LAUNCHER, left), name="launcher watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        left.set()
        watch.join()


def _watch(launcher: int, left: threading.Event) -> None:
    leaving = False
    while os.getppid() == launcher:
        if leaving:
            return
        leaving = left.wait(1.0)
    if os.environ.get("RANK") == "0":
        log.warning("torchrun (process %d), which started this run, has ended: saving and stopping", launcher)
    if leaving:  # another rank saw it first
        return
    os.kill(os.getpid(), signal.SIGTERM)
    if not left.wait(_GRACE_S):
        with suppress(OSError):  # torchrun may have been the reader of this pipe
            sys.stderr.write(
                f"rank {os.environ.get('RANK')} could not stop within {_GRACE_S:g} s after torchrun's end\n"
            )
            sys.stderr.flush()
        os._exit(EXIT_CODE)

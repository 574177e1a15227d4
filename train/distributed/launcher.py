"""Ranks whose launcher is gone stop: nothing else would end them, and they would write into a run that goes on."""

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
"""For the step at hand and a checkpoint, once the launcher is gone."""


@contextmanager
def leaving_with_launcher() -> Iterator[None]:
    """Watch the process that started this rank, if it is torchrun; when it is gone, save and leave as on SIGTERM.

    A rank that cannot, because it waits for another, is ended after some seconds.
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
    while os.getppid() == launcher:
        if left.wait(1.0):
            return
    if os.environ.get("RANK") == "0":
        log.warning("torchrun (process %d), which started this run, is gone: saving and leaving", launcher)
    os.kill(os.getpid(), signal.SIGTERM)
    if not left.wait(_GRACE_S):
        with suppress(OSError):  # the launcher may have been the one who read it
            sys.stderr.write(f"rank {os.environ.get('RANK')} could not leave within {_GRACE_S:g} s of torchrun's end\n")
            sys.stderr.flush()
        os._exit(EXIT_CODE)

"""Processes that work for this one: they end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM came. It is no `Exception`, so that only the command line catches it."""


def start_worker() -> None:
    """Let a process of a pool end silently on Ctrl-C, and with its parent, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def clean_up_on_sigterm() -> None:
    """Raise `Terminated` on SIGTERM, so that files, locks and processes of this one are left as after an error."""

    def end(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():  # a pool would wait for their work
            child.terminate()
        raise Terminated(128 + number)

    signal.signal(signal.SIGTERM, end)

"""How worker processes, and those that start them, end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import FrameType


def exit_on_sigterm() -> None:
    """Raise `SystemExit` on SIGTERM, so that files, locks and worker processes are cleaned up as after an error."""

    def end(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():  # a pool would wait for their work
            child.terminate()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def start_worker() -> None:
    """Let a process of a pool end silently on Ctrl-C, and with its parent, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)

"""Handles requests to stop: the run saves a checkpoint and ends."""

import ctypes
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any


def stop_with_torchrun() -> None:
    """If torchrun started this rank, get SIGTERM when torchrun ends, also when it is killed.

    Otherwise the rank would go on, and a new start of the run would find its folder in use.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: what it gets when its parent ends


class Interrupted(Exception):  # noqa: N818  asked for, not an error
    """The run was stopped by a signal. It is saved and can be resumed."""

    def __init__(self, signal_number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + signal_number
        stopped = f"stopped by {signal.Signals(signal_number).name} after step {step}, saved in {folder}"
        super().__init__(f"{stopped}; continue with --resume auto, or a study by the same call")


class StopSignals:
    """Turns SIGTERM, SIGUSR1, SIGHUP (a closed terminal) and Ctrl-C into a request to stop after the current step.

    Ctrl-C ends a process at once that was asked before. Under nohup, SIGHUP stays ignored.

    Args:
        alone: whether this is the only rank.

    Attributes:
        signal_number: the signal that came; 0: none.
        agreed: whether all ranks know of it, so that the current step is the last.
    """

    def __init__(self, *, alone: bool) -> None:
        self.signal_number, self.agreed, self._alone = 0, False, alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            # Whatever the run waits for, such as a server. Files on the disk are whole at any time.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal_number = number
        self.agreed = self.agreed or self._alone

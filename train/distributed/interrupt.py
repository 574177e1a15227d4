"""Being asked to stop: save, say so, leave."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818  asked for, not an error
    """The run was asked to stop, has saved and can be resumed."""

    def __init__(self, signal_number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + signal_number
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} after step {step}, saved in {folder}; go on with --resume auto")


class StopSignals:
    """Turns SIGTERM, SIGHUP (a terminal that closes) and Ctrl-C into a wish that is granted between two steps.

    A second Ctrl-C is granted at once. Under nohup SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

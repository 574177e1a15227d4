"""A detector whose process ends at some images, as MediaPipe's does; it needs no packages."""

from __future__ import annotations

import os

from tools.find_boxes import row_without_hand


def start_process(confidence: float, hands: int) -> None:
    """Start at once."""


def never_starts(confidence: float, hands: int) -> None:
    """End the process."""
    os._exit(1)


def rows_of(root: str, name: str) -> list[list[str]]:
    """The row of an image; "ends" in its name ends the process."""
    if "ends" in name:
        os._exit(1)
    return [row_without_hand(name, "none")]

"""Paths that a shell should have changed."""

from __future__ import annotations

import os
import re

_OF_THE_SHELL = re.compile(r"~|\$\w|.*\$\{")


def is_left_to_shell(path: str) -> bool:
    """Whether a path holds a ~ or $NAME that no shell has replaced, as in quotes, behind "=" or in a file.

    Taken as it is, it would make a folder named "~".
    """
    return _OF_THE_SHELL.match(path) is not None and not os.path.lexists(path)

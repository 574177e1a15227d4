"""Recognises paths with a ~ or $NAME that a shell should have replaced."""

from __future__ import annotations

import os
import re


def is_left_to_shell(path: str) -> bool:
    """Whether a path contains a ~ or $NAME that no shell has replaced, as in quotes, after "=" or in a file.

    Otherwise a folder named "~" would be made.
    """
    return re.match(r"~|\$\w|.*\$\{", path) is not None and not os.path.lexists(path)

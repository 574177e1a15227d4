"""The command line, called in this process."""

from __future__ import annotations

import pytest

from cli import main


def run_cli(*arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    with pytest.raises(SystemExit) as leaving:
        main.main(list(arguments))
    return int(leaving.value.code or 0)

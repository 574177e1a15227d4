"""The command line, called in this process."""

from collections.abc import Iterable

import pytest

from peclr_dali.cli import main


def as_options(settings: Iterable[str]) -> list[str]:
    """`--set` before each of the settings."""
    return [word for setting in settings for word in ("--set", setting)]


def run_cli(*arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    with pytest.raises(SystemExit) as leaving:
        main.main(list(arguments))
    return int(leaving.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command prints which ends with exit code 2."""
    capsys.readouterr()
    code = run_cli(*arguments)
    error = capsys.readouterr().err
    assert (code, error.count("\n"), error[-1:]) == (2, 1, "\n"), error
    return error

"""What the command line makes of errors."""

from __future__ import annotations

import errno
import os
from unittest.mock import Mock

import pytest

from peclr_dali.errors import as_size
from tests.command_line import run_cli


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/closed"),
            "error: /closed: Permission denied. Check the path, its permissions and the disk",
        ),
        (
            ModuleNotFoundError("No module named 'timm'", name="timm"),
            "error: No module named 'timm'. In the checkout, \"pip install '.[all]'\"",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("peclr_dali.train.preview.preview", Mock(side_effect=error))
    assert run_cli("views", "out.png") == 2
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), MemoryError(), OSError("no space"), ModuleNotFoundError(name="peclr_dali.x")]
)
def test_other_errors_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peclr_dali.train.preview.preview", Mock(side_effect=error))
    with pytest.raises(type(error)):
        run_cli("views", "out.png")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**63, "8388608.0 TiB")],
)
def test_sizes(count: float, text: str) -> None:
    assert as_size(count) == text

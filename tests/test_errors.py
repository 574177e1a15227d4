"""What the command line makes of errors."""

import errno
import os
import platform
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from peclr_dali.errors import MachineError, as_size
from peclr_dali.train.distributed.interrupt import Interrupted
from tests.command_line import run_cli


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/closed"), 2,
            "error: /closed: Permission denied. Check the path, its permissions and the disk",
        ),
        (
            ModuleNotFoundError("No module named 'timm'", name="timm"), 2,
            "error: No module named 'timm'. In the checkout, \"pip install '.[all]' torch==X\"",
        ),
        (FileNotFoundError(errno.ENOENT, "gone"), 2, "error: the working folder: gone. Check"),
        (MachineError("the folder is\ngone"), 1, "error: the folder is gone\n"),
        (Interrupted(signal.SIGTERM, 7, Path("run")), 143, "stopped by SIGTERM after step 7, saved in run; continue"),
        (KeyboardInterrupt(), 130, "aborted\n"),
    ],
    ids=lambda case: type(case).__name__,
)  # fmt: skip
@pytest.mark.parametrize("rank", [None, "3"])
def test_what_a_user_can_mend_is_one_line(
    rank: str | None,
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("peclr_dali.pipelines.sources.load_index", Mock(side_effect=error))
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert run_cli("views", "out.png") == code
    printed = capsys.readouterr().err
    assert printed.startswith(line if rank is None else f"rank 3 on {platform.node()}: {line}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), MemoryError(), OSError("no space"), ModuleNotFoundError(name="peclr_dali.x")]
)
def test_other_errors_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peclr_dali.pipelines.sources.load_index", Mock(side_effect=error))
    with pytest.raises(type(error)):
        run_cli("views", "out.png")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**63, "8388608.0 TiB")],
)
def test_sizes(count: float, text: str) -> None:
    assert as_size(count) == text

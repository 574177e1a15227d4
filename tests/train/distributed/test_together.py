"""What fails on one rank fails on all, in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from errors import UserError
from tests.train import ranks, tiny_run
from train.distributed.interrupt import StopSignals
from train.distributed.together import Together, together
from train.distributed.world import World

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/labels.json")


def full_disk() -> None:
    raise NO_ROOM


def no_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("action", "said"),
    [(full_disk, r"^/data/labels\.json: No space left on device\."), (no_memory, r"^out of memory: ")],
)
def test_errors_of_the_machine_are_reported_like_bad_input(action: Callable[[], None], said: str) -> None:
    with pytest.raises(UserError, match=said):
        together(World(), action)
    with StopSignals() as stop, pytest.raises(UserError, match=said):
        next(Together(World(), stop, action).each([1]))


def test_a_defect_is_not_reported_as_bad_input() -> None:
    with pytest.raises(ZeroDivisionError):
        together(World(), lambda: 1 / 0)


def pretrain_where_rank_1_has_no_room(settings: list[str]) -> None:
    with patch("train.trainer.load_index", side_effect=NO_ROOM) if os.environ["RANK"] == "1" else nullcontext():
        ranks.pretrain(settings)


def test_ranks_leave_at_once_when_one_has_no_room(tmp_path: Path) -> None:
    """The others' watchdog would take ten minutes."""
    tiny_run.write_images(tmp_path / "images")
    settings = tiny_run.settings(tmp_path / "images", tmp_path / "run", "run.rank_timeout_s=600")
    log = tmp_path / "log"
    started = ranks.start_ranks(2, pretrain_where_rank_1_has_no_room, settings, log=log)
    output = ranks.finish(started, log, code=2, timeout_s=200)
    (line,) = (line for line in output.splitlines() if "error" in line)
    assert line.startswith("rank 1 on ")
    assert "error: /data/labels.json: No space left on device" in line
    assert "Traceback" not in output

"""What fails on one rank fails on all, in one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from peclr_dali.errors import ReportedByAnotherRank, UserError
from peclr_dali.train.distributed.interrupt import StopSignals
from peclr_dali.train.distributed.together import steps_of_all_ranks, together
from peclr_dali.train.distributed.world import World, require_same
from tests.train import ranks, tiny_run

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
        next(steps_of_all_ranks(World(), stop, action, [1]))


def test_a_defect_is_not_reported_as_bad_input() -> None:
    with pytest.raises(ZeroDivisionError):
        together(World(), lambda: 1 / 0)


def test_ranks_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = [("fp16", "a"), ("fp16", "a"), ("bf16", "b"), ("bf16", "b")]
    monkeypatch.setattr(World, "gather_objects", lambda self, mine: everybody)
    said = "the ranks have different precisions: rank 0 on a has fp16, rank 2 on b has bf16. Set it"
    for rank, kind in ((0, UserError), (1, ReportedByAnotherRank), (3, ReportedByAnotherRank)):
        with pytest.raises(UserError) as caught:
            require_same(World(rank, 4), "precisions", "", "Set it")
        assert (type(caught.value), str(caught.value)) == (kind, said)
    everybody[2:] = everybody[:2]
    require_same(World(0, 4), "precisions", "", "Set it")


def pretrain_where_rank_1_differs(what: str, settings: list[str], *others: str) -> None:
    elsewhere = World(1, 2, 1, torch.device("meta"), 2)
    change: dict[str, AbstractContextManager[Any]] = {
        "device": patch("peclr_dali.train.trainer.described_world", return_value=elsewhere),
        "precision": patch("peclr_dali.train.steps.training_state.resolve_precision", return_value="fp64"),
    }
    if os.environ["RANK"] == "0":
        ranks.pretrain(settings)
    with change.get(what, nullcontext()):
        ranks.pretrain([*settings, *others])


@pytest.mark.parametrize(
    ("what", "others", "said"),
    [
        ("device", [], r"different devices: rank 0 on \S+ has cpu, rank 1 on \S+ has meta\."),
        ("precision", [], r"different precisions: rank 0 on \S+ has fp32, rank 1 on \S+ has fp64\."),
        (
            "data", ["data.root={here}/few", "pipelines.threads=2"],
            r"different data: rank 0 on \S+ has 50 images \(.*\), rank 1 on \S+ has 49 images \(",
        ),
        ("rate", ["optim.lr=2e-3"], r"different values of optim\.lr: rank 0 on \S+ has 0\.001, rank 1 .* has 0\.002\."),
        ("steps", ["run.log_every=3"], r"different values of run\.log_every: rank 0 on \S+ has 2, rank 1 .* has 3\."),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)  # fmt: skip
def test_ranks_that_differ_do_not_begin(what: str, others: list[str], said: str, tmp_path: Path) -> None:
    """Their weights would part without a message, or they would wait for each other in vain."""
    tiny_run.write_images(tmp_path / "all")
    tiny_run.write_images(tmp_path / "few", 49)
    settings = tiny_run.settings(tmp_path / "all", tmp_path / "run", "train.precision=fp32")
    started = ranks.start_ranks(
        2, pretrain_where_rank_1_differs, what, settings, *(one.format(here=tmp_path) for one in others),
        log=tmp_path / "log",
    )  # fmt: skip
    output = ranks.finish(started, tmp_path / "log", code=2)
    (line,) = (line for line in output.splitlines() if "error" in line)
    assert re.match(f"error: the ranks have {said}", line)
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "config.toml").exists()


def pretrain_where_rank_1_has_no_room(action: str, settings: list[str], launch: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{launch}/attempt_0/{os.environ['RANK']}/error.json"
    with patch(action, side_effect=NO_ROOM) if os.environ["RANK"] == "1" else nullcontext():
        ranks.pretrain(settings)


@pytest.mark.parametrize(
    "action", ["peclr_dali.train.trainer.load_index", "peclr_dali.train.trainer.Meter"], ids=["together", "alone"]
)
def test_ranks_leave_at_once_when_one_has_no_room(action: str, tmp_path: Path) -> None:
    """The others would wait for ten minutes. Torchrun may restart them, since there may be room then."""
    (tmp_path / "launch" / "attempt_0").mkdir(parents=True)
    tiny_run.write_images(tmp_path / "images")
    settings = tiny_run.settings(tmp_path / "images", tmp_path / "run", "run.rank_timeout_s=600")
    log = tmp_path / "log"
    started = ranks.start_ranks(
        2, pretrain_where_rank_1_has_no_room, action, settings, str(tmp_path / "launch"), log=log
    )
    output = ranks.finish(started, log, code=2, timeout_s=200)
    (line,) = (line for line in output.splitlines() if "error" in line)
    assert line.startswith("rank 1 on ")
    assert "error: /data/labels.json: No space left on device" in line
    assert [file.name for file in (tmp_path / "launch").rglob("*")] == ["attempt_0"]
    assert "Traceback" not in output

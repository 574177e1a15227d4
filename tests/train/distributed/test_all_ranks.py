"""What fails on one rank fails on all, and each rank says so."""

import errno
import os
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from peclr_dali.errors import AnotherRankFailed
from peclr_dali.train.distributed.world import World, described_world, joined, on_all_ranks
from tests.train import ranks, tiny_run


def _fail_on_ranks_1_and_2(out: str) -> None:
    world = described_world("cpu")
    with joined(world, 60.0):
        try:
            with on_all_ranks(world), on_all_ranks(world):
                _ = 1 / (0 if world.rank in (1, 2) else 1)
        except (ZeroDivisionError, AnotherRankFailed) as error:
            Path(out, str(world.rank)).write_text(repr(error))


def test_the_lowest_failed_rank_raises_its_error_through_nested_calls(tmp_path: Path) -> None:
    ranks.run_ranks(3, _fail_on_ranks_1_and_2, str(tmp_path), log=tmp_path / "log")
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    elsewhere = "AnotherRankFailed('rank 1 has failed: division by zero')"
    assert found == [elsewhere, "ZeroDivisionError('division by zero')", elsewhere]


def pretrain_where_rank_1_differs(what: str, settings: list[str], *others: str) -> None:
    elsewhere = World(1, 2, 1, torch.device("meta"), 2)
    change: dict[str, AbstractContextManager[Any]] = {
        "device": patch("peclr_dali.train.runs.run.described_world", return_value=elsewhere),
        "precision": patch("peclr_dali.train.runs.run.resolve_precision", return_value="fp64"),
    }
    if os.environ["RANK"] == "0":
        ranks.pretrain(settings)
    with change.get(what, nullcontext()):
        ranks.pretrain([*settings, *others])


@pytest.mark.parametrize(
    ("what", "others", "said"),
    [
        ("device", [], r"different devices \(rank 0: cpu, rank 1: meta\)"),
        ("precision", [], r"different precisions: rank 0 on \S+ has fp32, rank 1 on \S+ has fp64\."),
        (
            "data", ["data.root={here}/few", "pipelines.threads=2"],
            r"different data: rank 0 on \S+ has 50 images \(.*\), rank 1 on \S+ has 49 images \(",
        ),
        ("rate", ["optim.lr=2e-3"], r"different values of optim\.lr: rank 0 on \S+ has 0\.001, rank 1 .* has 0\.002\."),
    ],
    ids=["device", "precision", "data", "rate"],
)  # fmt: skip
def test_ranks_that_differ_do_not_begin(what: str, others: list[str], said: str, images: Path, tmp_path: Path) -> None:
    """Their weights would part without a message, or they would wait for each other in vain."""
    tiny_run.write_images(tmp_path / "few", 49)
    settings = tiny_run.settings(images, tmp_path / "run", "train.precision=fp32")
    differing = [one.format(here=tmp_path) for one in others]
    output = ranks.run_ranks(2, pretrain_where_rank_1_differs, what, settings, *differing, log=tmp_path / "log", code=2)
    assert len(re.findall(rf"^rank [01] on \S+: error: .*the ranks have {said}", output, re.MULTILINE)) == 2
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "config.toml").exists()


def pretrain_where_rank_1_has_no_room(action: str, settings: list[str]) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/labels.json")
    with patch(action, side_effect=full) if os.environ["RANK"] == "1" else nullcontext():
        ranks.pretrain(settings)


@pytest.mark.parametrize(
    ("action", "code"), [("runs.run.load_index", 2), ("pretrain.Meter", 1)], ids=["agreed", "alone"]
)
def test_ranks_leave_at_once_when_one_has_no_room(action: str, code: int, images: Path, tmp_path: Path) -> None:
    """The others would wait for ten minutes. Outside of `on_all_ranks` they see that the connection is closed."""
    settings = tiny_run.settings(images, tmp_path / "run", "train.micro_batch=4", "run.rank_timeout_s=600")
    log = tmp_path / "log"
    where = f"peclr_dali.train.{action}"
    processes = ranks.start_ranks(3, pretrain_where_rank_1_has_no_room, where, settings, log=log)
    try:
        for process, expected in zip(processes, (code, 2, code), strict=True):
            process.join(200)
            assert process.exitcode == expected
    finally:
        ranks.kill(processes)
    output = log.read_text()
    here = platform.node()
    assert f"rank 1 on {here}: error: /data/labels.json: No space left on device" in output
    assert ("Traceback" in output) == (code == 1)
    if code == 2:
        for rank in (0, 2):
            assert f"rank {rank} on {here}: error: rank 1 has failed: [Errno 28] No space left on device" in output
        assert not (tmp_path / "run").exists()

"""What several ranks would say alike is printed once."""

from __future__ import annotations

import logging

import pytest

from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.log import configure_logging, warned_once

log = logging.getLogger(__name__)


pytestmark = pytest.mark.usefixtures("logging_set_back")


@pytest.mark.parametrize(("rank", "printed"), [(None, "a note\na warning\n"), ("0", "a note\na warning\n"),
                                               ("1", "a warning\n")])  # fmt: skip
def test_only_rank_0_prints_notes(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    configure_logging()
    log.info("a note")
    log.warning("a warning")
    assert capsys.readouterr().err == printed


def test_warnings_of_all_ranks_are_those_of_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(3):
        with warned_once(World(rank, 3)):
            log.warning("3 images are left out")
            log.error("rank %d has an error", rank)
        log.warning("rank %d is slow", rank)
    said = [line.message for line in caplog.records]
    assert said.count("3 images are left out") == 1
    for rank in range(3):
        assert f"rank {rank} has an error" in said
        assert f"rank {rank} is slow" in said

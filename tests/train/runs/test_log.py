"""What several ranks would say alike is printed once."""

import logging

import pytest

from peclr_dali.train.runs.log import configure_logging

log = logging.getLogger(__name__)


pytestmark = pytest.mark.usefixtures("logging_set_back")


@pytest.mark.parametrize(("rank", "printed"), [(None, "a note\na warning\n"), ("0", "a note\na warning\n"),
                                               ("1", "")])  # fmt: skip
def test_only_rank_0_prints(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    configure_logging()
    log.info("a note")
    log.warning("a warning")
    assert capsys.readouterr().err == printed

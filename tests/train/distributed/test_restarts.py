"""Under torchrun, bad input is reported once and not tried again; a run that lost a rank is restarted."""

from __future__ import annotations

import errno
import re
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from peclr_dali import cli
from peclr_dali.errors import Outage, RanksLost, ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import machine_error_line
from peclr_dali.train.commands import training
from tests.command_line import as_options, run_cli
from tests.train import ranks, tiny_run


def launch(*arguments: str, restarts: int, log: Path) -> list[str]:
    """What the ranks that torchrun starts print."""
    torchrun = ["--nproc-per-node=2", f"--max-restarts={restarts}", f"--master-port={ranks.free_port()}"]
    processes = ranks.start_ranks(1, ranks.torchrun, [*torchrun, "cli.py", *arguments], log=log)
    printed = ranks.finish(processes, log, code=1)
    assert printed.count("failed (exitcode: 2)") == restarts + 1, printed  # torchrun's line for each attempt
    return [line for line in printed.splitlines() if "error: " in line]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "data.root={here}/no"], "error: {here}/no: does not exist; expected the folder of the images"),
        (
            ["--set", "data.source=folder", "--set", "data.root={here}/empty"],
            "error: {here}/empty: no .jpg",
        ),  # found later
        (["--speed=high"], "error: No such option '--speed'"),
    ],
    ids=["no folder", "no images", "no such option"],
)
def test_torchrun_reports_bad_input_once(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    filled = [argument.replace("{here}", str(tmp_path)) for argument in arguments]
    steps = ["--set", "train.batch=8", "--set", "train.micro_batch=4", "--set", "train.device=cpu"]
    (line,) = launch("pretrain", "--out", str(tmp_path / "out"), *steps, *filled, restarts=1, log=tmp_path / "log")
    assert expected.replace("{here}", str(tmp_path)) in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launch of torchrun's, as its workers see it."""
    error_file = tmp_path / "launch" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    return tmp_path / "launch"


def caused_by(cause: OSError) -> UserError:
    error = UserError("cannot be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (UserError("a wrong key"), True),
        (RanksLost("rank 2"), False),
        (Outage("s3://images: 11 attempts failed"), False),
        (OSError(errno.ENOENT, "No such file or directory", "/a"), True),
        (OSError(errno.EIO, "Input/output error", "/a"), False),
        (MemoryError(), True),
        (caused_by(OSError(errno.EACCES, "Permission denied")), True),
        (caused_by(OSError(errno.ENOSPC, "No space left on device")), False),
        (caused_by(OSError("not a regular file")), True),
    ],
    ids=repr,
)
def test_a_restart_follows_where_it_may_help(
    error: Exception, refused: bool, attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(training, "_resolve", fail)
    assert run_cli("pretrain") == 2
    assert capsys.readouterr().err == f"error: {machine_error_line(error) or error}\n"
    assert (attempt / "bad_input").exists() == refused
    assert run_cli("pretrain") == 2
    assert (capsys.readouterr().err == "") == refused


@pytest.mark.parametrize("transient", [False, True])
def test_a_rank_leaves_after_another_has_reported(
    transient: bool, attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ReportedByAnotherRank("rank 1: no room", transient=transient)

    slept: list[float] = []
    monkeypatch.setattr(training, "_resolve", fail)
    monkeypatch.setattr("peclr_dali.cli.time.sleep", slept.append)
    assert run_cli("pretrain") == 2
    assert capsys.readouterr().err == ""
    assert slept == [5.0], "torchrun ends this rank after the other one has reported"
    assert (attempt / "bad_input").exists() != transient
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "attempt_1" / "0" / "error.json"))
    assert run_cli("pretrain") == 2
    assert (len(slept) == 2) == transient, "without waiting, if the input is bad"


def test_the_first_rank_of_a_host_reports_a_mistake(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_REPORT_S", 0.0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for words in (["--set", "optim.rate=1"], ["--speed=high"], ["--set", "data.root=/nowhere"]):
        (attempt / "bad_input").unlink(missing_ok=True)
        assert run_cli("pretrain", *words) == 2
        assert capsys.readouterr().err == ""


EPOCHS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, with its images beside it."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    tiny_run.write_images(out.parent / "images")
    tiny_run.finish(tiny_run.start(pretraining(out.parent / "images", out), processes=2))
    return out


def pretraining(images: Path, out: Path) -> list[str]:
    settings = tiny_run.settings(images, out, f"train.epochs={EPOCHS}", "run.rank_timeout_s=60")
    return ["pretrain", "--resume", "auto", *as_options(settings)]


@pytest.mark.slow  # whole runs under torchrun, which gives a stopped rank 30 s to end
@pytest.mark.parametrize(
    ("victim", "by"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_one_that_did_not(
    victim: int, by: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    out, steps = tmp_path / "run", 4 * EPOCHS
    with tiny_run.start(pretraining(undisturbed.parent / "images", out), processes=2, restarts=1) as torchrun:
        try:
            while not (out / "checkpoints" / "step_000000006.pt").exists():
                assert torchrun.poll() is None
                time.sleep(0.01)
            children = psutil.Process(torchrun.pid).children()
            (rank,) = (child for child in children if child.environ().get("RANK") == str(victim))
            rank.send_signal(by)
            printed = torchrun.communicate(timeout=400)[0]
        finally:
            torchrun.kill()
    assert torchrun.returncode == 0, printed
    named = re.findall(r"error: no answer from rank (\d) on \S+: killed, stopped, cut off from the network", printed)
    # torchrun sees a rank that was killed itself, and may end the others before they have found out.
    assert named == [str(victim)] or (by == signal.SIGKILL and named == [] and "Signal 9 (SIGKILL)" in printed), printed
    assert "resuming after step" in printed
    assert "Traceback" not in printed
    ours, theirs = tiny_run.final_weights(out, steps), tiny_run.final_weights(undisturbed, steps)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(undisturbed)

"""Under torchrun, a mistake of all ranks is one line of each, and a run that lost a rank is restarted."""

import platform
import re
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from tests.command_line import as_options
from tests.train import ranks, tiny_run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "train.bach=4"], "error: --set train.bach=4: unknown key train.bach: did you mean train.batch?"),
        (["--set", "data.source=folder", "--set", "data.root={here}/empty"], "error: {here}/empty: no .jpg"),
    ],
    ids=["before torch is imported", "when the ranks are connected"],
)
def test_under_torchrun_a_mistake_of_all_ranks_is_one_line_of_each(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    filled = [argument.replace("{here}", str(tmp_path)) for argument in arguments]
    steps = as_options(["train.batch=8", "train.micro_batch=4", "train.device=cpu"])
    command = ["--nproc-per-node=2", f"--master-port={ranks.free_port()}", "cli.py", "pretrain", *steps, *filled]
    printed = ranks.run_ranks(
        1, ranks.torchrun, [*command, "--out", str(tmp_path / "out")], log=tmp_path / "log", code=1
    )
    lines = [line for line in printed.splitlines() if "error: " in line]
    assert all(re.match(rf"rank [01] on {platform.node()}: error: ", line) for line in lines)
    assert any(expected.replace("{here}", str(tmp_path)) in line for line in lines)
    assert not (tmp_path / "out").exists()


EPOCHS, TIMEOUT_S = 30, 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, with its images beside it."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    tiny_run.write_images(out.parent / "images")
    ranks.run_ranks(1, ranks.torchrun, pretraining(out.parent / "images", out), log=out.parent / "log")
    return out


def pretraining(images: Path, out: Path) -> list[str]:
    """The words of torchrun."""
    settings = tiny_run.settings(images, out, f"train.epochs={EPOCHS}", f"run.rank_timeout_s={TIMEOUT_S}")
    launcher = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    return [*launcher, tiny_run.CLI, "pretrain", "--resume", "auto", *as_options(settings)]


@pytest.mark.slow  # whole runs under torchrun, which gives a stopped rank 30 s to end
@pytest.mark.parametrize(
    ("victim", "by"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_one_that_did_not(
    victim: int, by: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    out, steps = tmp_path / "run", 4 * EPOCHS
    words, log = pretraining(undisturbed.parent / "images", out), tmp_path / "log"
    (torchrun,) = ranks.start_ranks(1, ranks.torchrun, words, log=log)
    try:
        while not (out / "checkpoints" / "step_000000006.pt").exists():
            assert torchrun.is_alive()
            time.sleep(0.01)
        children = psutil.Process(torchrun.pid).children()
        (rank,) = (child for child in children if child.environ().get("RANK") == str(victim))
        rank.send_signal(by)
        rank.wait(TIMEOUT_S + 40)  # torchrun gives the others 30 s after the first one ended
        assert "resuming after step" in ranks.finish([torchrun], log, timeout_s=400)
    finally:
        ranks.kill([torchrun])
    ours, theirs = tiny_run.final_weights(out, steps), tiny_run.final_weights(undisturbed, steps)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(undisturbed)

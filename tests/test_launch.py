"""The SLURM script, with stand-ins for SLURM and torchrun: it starts, saves before the end, and queues itself again."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config

SCRIPT = Path(__file__).parents[1] / "launch" / "pretrain.slurm"
STAND_INS = {
    "bin/scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> scontrol.log; fi',
    "bin/srun": 'echo "${SRUN_CPUS_PER_TASK-unset}" > cpus.log; shift; SLURM_NODEID=1 exec "$@"',
    ".venv/bin/torchrun": (
        'echo "$@" > torchrun.log; trap "echo saved >> torchrun.log; exit 143" TERM\n'
        'if [ "$CODE" = wait ]; then while :; do sleep 0.1; done; fi; exit "$CODE"'
    ),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, commands in STAND_INS.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{commands}\n")
        file.chmod(0o755)
    return tmp_path


def start(
    checkout: Path, code: str, *, seconds: int, restarts: int = 0, cpus: str | None = None
) -> subprocess.Popen[bytes]:
    """The script, `seconds` after it began; torchrun ends with this code."""
    environment = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": str(restarts), "SECONDS": str(seconds), "CODE": code,
    }  # fmt: skip
    if cpus is not None:
        environment["SLURM_CPUS_PER_TASK"] = cpus
    return subprocess.Popen(["bash", str(SCRIPT), "-c", "configs/demo.toml"], cwd=checkout, env=environment)


def requeued(checkout: Path) -> bool:
    log = checkout / "scontrol.log"
    return log.exists() and log.read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("code", "seconds", "restarts", "again"),
    [("0", 400, 0, False), ("1", 400, 0, True), ("1", 0, 0, False), ("1", 200, 0, False), ("1", 400, 20, False)],
)
def test_a_job_that_failed_late_is_queued_again(
    code: str, seconds: int, restarts: int, again: bool, checkout: Path
) -> None:
    assert start(checkout, code, seconds=seconds, restarts=restarts).wait(60) == int(code)
    assert requeued(checkout) == again
    said = (checkout / "torchrun.log").read_text()
    assert "--nnodes=2 --nproc-per-node=gpu" in said
    assert "--rdzv-endpoint=node1:29400 --rdzv-conf=is_host=false," in said
    assert said.endswith("cli.py pretrain --resume auto -c configs/demo.toml\n")


@pytest.mark.parametrize(("cpus", "passed_on"), [("32", "32\n"), (None, "unset\n")])
def test_srun_gets_the_processors_of_the_job(cpus: str | None, passed_on: str, checkout: Path) -> None:
    assert start(checkout, "0", seconds=400, cpus=cpus).wait(60) == 0
    assert (checkout / "cpus.log").read_text() == passed_on


def test_before_its_time_is_up_a_job_saves_and_is_queued_again(checkout: Path) -> None:
    job = start(checkout, "wait", seconds=400)
    log = checkout / "torchrun.log"
    limit = time.monotonic() + 60
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) != 0
    assert log.read_text().endswith("saved\n")
    assert requeued(checkout)


@pytest.mark.parametrize(
    ("file", "nodes", "gpus"),
    [
        (SCRIPT, r"#SBATCH --nodes=(\d+)", r"#SBATCH --gpus-per-node=(\d+)"),
        (SCRIPT.with_name("pytorchjob.yaml"), r"maxReplicas: (\d+)", r"nProcPerNode: (\d+)"),
    ],
)
def test_every_rank_that_is_started_has_work(file: Path, nodes: str, gpus: str) -> None:
    text = file.read_text()
    (config,) = set(re.findall(r"configs/\w+\.toml", text))
    train = load_config(Config, [SCRIPT.parents[1] / config], []).train
    started = int(re.findall(nodes, text)[0]) * int(re.findall(gpus, text)[0])
    assert micro_batch_share(train.batch, train.micro_batch, started - 1, started)

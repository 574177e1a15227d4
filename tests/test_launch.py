"""The SLURM script, with stand-ins for SLURM and torchrun; and the fields of the job for Kubernetes."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config

SCRIPT = Path(__file__).parents[1] / "launch" / "train.slurm"
TRAIN_JOB = SCRIPT.with_name("trainjob.yaml")
STAND_INS = {
    "bin/scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> scontrol.log; fi',
    "bin/srun": (
        'echo "${SRUN_CPUS_PER_TASK-unset}" > cpus.log\n'
        'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=1 exec "$@"'
    ),
    ".venv/bin/python": 'echo "$@" > python.log; exit "$CHECK"',
    ".venv/bin/torchrun": (  # a signal to the job, in place of a code
        'trap "echo saved >> torchrun.log; exit 143" TERM; echo "$@" > torchrun.log\n'
        'if [[ "$CODE" == SIG* ]]; then sleep 0.2; kill -s "$CODE" $PPID; while :; do sleep 0.1; done; fi; exit "$CODE"'
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


def run(checkout: Path, code: str, *, seconds: int = 400, restarts: int = 0, check: int = 0) -> int:
    """The exit code of the script, `seconds` after it began; the check and torchrun end with these codes."""
    environment = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": str(restarts), "SLURM_CPUS_PER_TASK": "32",
        "SECONDS": str(seconds), "CODE": code, "CHECK": str(check),
    }  # fmt: skip
    return subprocess.run(
        ["bash", SCRIPT, "pretrain", "-c", "demo"], cwd=checkout, env=environment, timeout=60, check=False
    ).returncode


def requeued(checkout: Path) -> bool:
    return [log.read_text() for log in checkout.glob("scontrol.log")] == ["requeue 20007\n"]


@pytest.mark.parametrize(
    ("code", "seconds", "restarts", "again"),
    [("0", 400, 0, False), ("1", 400, 0, True), ("1", 0, 0, False), ("1", 200, 0, False), ("1", 400, 20, False)],
)
def test_a_job_that_failed_late_is_queued_again(
    code: str, seconds: int, restarts: int, again: bool, checkout: Path
) -> None:
    assert run(checkout, code, seconds=seconds, restarts=restarts, check=1) == int(code)
    assert requeued(checkout) == again
    said = (checkout / "torchrun.log").read_text()
    assert "--nnodes=2 --nproc-per-node=gpu" in said
    assert "--rdzv-endpoint=node1:10007 --rdzv-conf=is_host=false," in said
    assert said.endswith("cli.py pretrain -c demo --resume auto\n")
    assert (checkout / "cpus.log").read_text() == "32\n"


def test_a_mistake_ends_the_job_before_torchrun(checkout: Path) -> None:
    assert run(checkout, "0", check=2) == 2
    assert (checkout / "python.log").read_text() == "cli.py pretrain -c demo --resume auto --check\n"
    assert not (checkout / "torchrun.log").exists()
    assert not requeued(checkout)


SIGNAL = re.findall(r"^#SBATCH --signal=B:(\w+)@", SCRIPT.read_text(), re.MULTILINE)[0]


@pytest.mark.parametrize(("signal", "again"), [(f"SIG{SIGNAL}", True), ("SIGTERM", False)])
def test_a_job_saves_before_its_time_is_up_and_when_it_is_cancelled(signal: str, again: bool, checkout: Path) -> None:
    assert run(checkout, signal) == 143
    assert (checkout / "torchrun.log").read_text().endswith("saved\n")
    assert requeued(checkout) == again


@pytest.mark.parametrize(
    ("file", "nodes", "gpus"),
    [
        (SCRIPT, r"#SBATCH --nodes=(\d+)", r"#SBATCH --gpus-per-node=(\d+)"),
        (TRAIN_JOB, r"numNodes: (\d+)", r"numProcPerNode: (\d+)"),
    ],
)
def test_every_rank_that_is_started_has_work(file: Path, nodes: str, gpus: str) -> None:
    text = file.read_text()
    train = load_config(Config, [SCRIPT.parents[1] / re.findall(r"configs/\w+\.toml", text)[0]], []).train
    started = int(re.findall(nodes, text)[0]) * int(re.findall(gpus, text)[0])
    assert micro_batch_share(train.batch, train.micro_batch, started - 1, started)


JOBS = "spec.template.spec.replicatedJobs"
POD = f"{JOBS}.template.spec.template.spec"
FIELDS = {
    "": "apiVersion kind metadata spec",
    "metadata": "name namespace labels annotations",
    "spec": "mlPolicy podGroupPolicy template / runtimeRef trainer suspend managedBy activeDeadlineSeconds",
    "spec.mlPolicy": "numNodes torch mpi",
    "spec.mlPolicy.torch": "",
    "spec.template": "metadata spec",
    "spec.template.spec": "replicatedJobs network successPolicy failurePolicy ttlSecondsAfterFinished",
    JOBS: "name groupName replicas template dependsOn",
    f"{JOBS}.dependsOn": "name status",
    f"{JOBS}.template": "metadata spec",
    f"{JOBS}.template.metadata": "labels annotations",
    f"{JOBS}.template.spec": "backoffLimit activeDeadlineSeconds podFailurePolicy template ttlSecondsAfterFinished",
    f"{JOBS}.template.spec.podFailurePolicy": "rules",
    f"{JOBS}.template.spec.podFailurePolicy.rules": "action onExitCodes onPodConditions",
    f"{JOBS}.template.spec.podFailurePolicy.rules.onExitCodes": "containerName operator values",
    f"{JOBS}.template.spec.template": "metadata spec",
    POD: "restartPolicy terminationGracePeriodSeconds securityContext containers volumes nodeSelector tolerations",
    f"{POD}.securityContext": "runAsNonRoot runAsUser runAsGroup fsGroup seccompProfile supplementalGroups",
    f"{POD}.securityContext.seccompProfile": "type localhostProfile",
    f"{POD}.containers": "name image command args env resources securityContext volumeMounts imagePullPolicy",
    f"{POD}.containers.env": "name value valueFrom",
    f"{POD}.containers.resources": "limits requests",
    f"{POD}.containers.securityContext": "allowPrivilegeEscalation capabilities readOnlyRootFilesystem privileged",
    f"{POD}.containers.securityContext.capabilities": "add drop",
    f"{POD}.containers.volumeMounts": "name mountPath readOnly subPath",
    f"{POD}.volumes": "name persistentVolumeClaim emptyDir hostPath",
    f"{POD}.volumes.persistentVolumeClaim": "claimName readOnly",
    f"{POD}.volumes.emptyDir": "medium sizeLimit",
    "spec.runtimeRef": "apiGroup kind name",
    "spec.trainer": "image command args env numNodes numProcPerNode resourcesPerNode",
}
"""Fields of Kubeflow Trainer 2.3, JobSet and Kubernetes, at their places; at others, any name is one of the user's."""


def unknown_fields(value: object, place: str = "") -> Iterator[str]:
    for part in value if isinstance(value, list) else [value]:
        for name, inner in part.items() if isinstance(part, dict) else ():
            if place in FIELDS and name not in FIELDS[place].split():
                yield f"{place}.{name}"
            yield from unknown_fields(inner, f"{place}.{name}".removeprefix("."))


def test_the_job_for_kubernetes_has_no_unknown_field() -> None:
    assert [*unknown_fields([*yaml.safe_load_all(TRAIN_JOB.read_text())])] == []
    assert [*unknown_fields({"spec": [{"trainer": {"maxRestarts": 3}}]})] == ["spec.trainer.maxRestarts"]

"""Two hosts, each a network namespace with its own address and name, that torchrun makes one run of."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command_line import as_options
from tests.conftest import Record
from tests.train import tiny_run

pytestmark = pytest.mark.slow  # a minute or two each: whole jobs start, are killed and start again

EPOCHS = 15
STEPS = 4 * EPOCHS
LIMIT_S = 25.0
LOST = "A collective fails when another rank has ended, hangs, or is late"
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
# Short enough for a test; docs/cluster.md says what a cluster needs.
RENDEZVOUS = (
    "join_timeout=120,last_call_timeout=2,close_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=8"
)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"may not make network namespaces: ip {' '.join(words)}: {done.stderr.strip()}")


class Host:
    """One namespace, and what runs in it."""

    def __init__(self, name: str, run: str) -> None:
        self.name, self.space, self.link = name, f"peclr-{run}-{name}", f"v{run}{name}"
        self.process: subprocess.Popen[str] | None = None
        self.log = Path()

    def launch(self, log: Path, nodes: str, settings: list[str]) -> None:
        """torchrun, as docs/cluster.md has it but with short limits, again and again until the job is done."""
        host = "true" if self.name == "a" else "false"
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESS['a']}:29400", "--rdzv-id=test", "--max-restarts=5",
            f"--local-addr={ADDRESS[self.name]}", f"--rdzv-conf=is_host={host},{RENDEZVOUS}",
            "cli.py", "pretrain", "--resume", "auto", *as_options(settings),
        ]  # fmt: skip
        again = 'for attempt in 1 2 3 4 5 6; do "$@" && exit 0; echo "again"; sleep 2; done; exit 1'
        self.log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c",
                 f"hostname host-{self.name}\n{again}", "sh", *torchrun],
                cwd=tiny_run.ROOT, stdout=output, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Ids of what runs in the namespace."""
        listed = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True).stdout.split()
        return [int(word) for word in listed]

    def kill_workers(self) -> None:
        """SIGKILL the ranks; torchrun lives on."""
        for process in self.processes():
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if b"cli.py" in command and b"torch.distributed.run" not in command:
                os.kill(process, signal.SIGKILL)

    def kill(self) -> None:
        """Power off."""
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait(10)


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces")
    run = str(os.getpid() % 10000)
    found = {name: Host(name, run) for name in ("a", "b")}
    a, b = found.values()
    try:
        for host in found.values():
            ip("netns", "add", host.space)
            ip("-n", host.space, "link", "set", "lo", "up")
        ip("link", "add", a.link, "netns", a.space, "type", "veth", "peer", "name", b.link, "netns", b.space)
        for host in found.values():
            ip("-n", host.space, "addr", "add", f"{ADDRESS[host.name]}/24", "dev", host.link)
            ip("-n", host.space, "link", "set", host.link, "up")
        yield found
    finally:
        for host in found.values():
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    images = tiny_run.write_images(tmp_path / "images")
    return tiny_run.settings(
        images, tmp_path / "out", f"train.epochs={EPOCHS}", "train.micro_batch=6", f"run.rank_timeout_s={LIMIT_S}",
        "run.log_every=1",
    )  # fmt: skip


def wait_for(what: str, ready: Callable[[], bool], hosts: dict[str, Host], limit_s: float = 900) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{host.name}: {host.log.read_text()[-4000:]}" for host in hosts.values() if host.process)
            pytest.fail(f"{what} did not come within {limit_s:g} s\n{logs}")
        time.sleep(0.1)


def steps_done(out: Path) -> int:
    return len(tiny_run.rows_of(out))


def finished(host: Host) -> Callable[[], bool]:
    return lambda: host.process is not None and host.process.poll() == 0


def assert_every_sample_once(out: Path) -> None:
    """Over the steps that the final weights contain: none is missing, none is there twice."""
    samples = tiny_run.samples_of_steps(out)
    assert sorted(samples) == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        seen = [sample for step in range(4 * epoch + 1, 4 * epoch + 5) for sample in samples[step]]
        assert len(seen) == len(set(seen)) == 48
    assert steps_done(out) == STEPS  # one row each: logs were cut back
    assert (out / "checkpoints" / f"step_{STEPS:09d}.pt").exists()


def test_killed_ranks_and_a_cut_link(
    hosts: dict[str, Host], settings: list[str], tmp_path: Path, record: Record
) -> None:
    a, b = hosts["a"], hosts["b"]
    out = tmp_path / "out"
    for host in hosts.values():
        host.launch(tmp_path / f"{host.name}.log", "2", settings)
    wait_for("step 6", lambda: steps_done(out) >= 6, hosts)
    b.kill_workers()
    wait_for("the loss of the killed ranks", lambda: LOST in a.log.read_text(), hosts, LIMIT_S + 30)
    wait_for("going on", lambda: "resuming after step" in a.log.read_text(), hosts)
    wait_for("step 20", lambda: steps_done(out) >= 20, hosts)

    ip("-n", a.space, "link", "set", a.link, "down")
    cut, said = time.monotonic(), {host.name: len(host.log.read_text()) for host in hosts.values()}

    def ended() -> bool:
        """Whether the ranks of both hosts have noticed."""
        return all(LOST in host.log.read_text()[said[host.name] :] for host in hosts.values())

    wait_for("the end of the ranks", ended, hosts, LIMIT_S + 30)
    reported_s = time.monotonic() - cut
    ip("-n", a.space, "link", "set", a.link, "up")
    wait_for("the end on a", finished(a), hosts)
    wait_for("the end on b", finished(b), hosts)
    assert_every_sample_once(out)
    record("hosts", proof="killed ranks and a cut link", steps=STEPS, limit_s=LIMIT_S, cut_reported_s=round(reported_s))


def test_a_host_that_dies_leaves_a_smaller_run(
    hosts: dict[str, Host], settings: list[str], tmp_path: Path, record: Record
) -> None:
    a, b = hosts["a"], hosts["b"]
    out = tmp_path / "out"
    for host in hosts.values():
        host.launch(tmp_path / f"{host.name}.log", "1:2", settings)
    wait_for("two ranks", lambda: (out / "samples-rank1.jsonl").exists() and steps_done(out) >= 6, hosts)
    killed_after = steps_done(out)
    assert killed_after < STEPS
    b.kill()
    wait_for("the end on a", finished(a), hosts)
    assert_every_sample_once(out)
    record("hosts", proof="a host that dies leaves a smaller run", steps=STEPS, killed_after=killed_after)

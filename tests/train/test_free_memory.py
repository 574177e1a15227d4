"""What is free is what every limit leaves."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import Pretraining, pretrain
from peclr_dali.train.steps import memory
from tests.train import tiny_run

GIB = 2**30
V2 = "0::/kubepods/pod7\n"
STAT = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n"
ODD = "alone\n\nx y z\ninactive_file ?\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {"kubepods/pod7/memory.max": 8 * GIB, "kubepods/pod7/memory.current": 3 * GIB}, 5 * GIB),
        (V2, {"memory.max": 8 * GIB, "memory.current": 3 * GIB, "memory.stat": STAT}, 7 * GIB),  # page cache goes
        (V2, {"memory.max": 8 * GIB, "memory.current": 3 * GIB, "memory.stat": f"{ODD}{STAT}"}, 7 * GIB),
        (V2, {"kubepods/pod7/memory.max": "max", "kubepods/pod7/memory.current": 3 * GIB,
              "kubepods/memory.max": 4 * GIB, "kubepods/memory.current": 3 * GIB}, GIB),
        (V2, {"memory.max": "max", "memory.current": 3 * GIB}, math.inf),
        (V2, {}, math.inf),
        ("", {}, math.inf),
    ],
)  # fmt: skip
def test_the_least_free_control_group_counts(
    cgroup: str, files: dict[str, object], expected: float, tmp_path: Path
) -> None:
    texts = {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.free_in_control_groups(tmp_path) == expected


def test_ranks_share_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_in_control_groups", lambda: 2**20)
    assert memory.free_bytes(World()) == 2**20
    assert memory.free_bytes(World(local_world_size=4)) == 2**18


@pytest.mark.parametrize(("share", "expected"), [(1.0, 12), (0.5, 8), (0.25, 2), (0.1, 0)])
def test_a_limit_on_the_gpu_memory_of_the_process_counts(
    share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may take a share of 24 GiB, holds 6 and uses 4 of them; the driver has 10 left."""
    given = {"mem_get_info": (10 * GIB, 24 * GIB), "memory_reserved": 6 * GIB, "memory_allocated": 4 * GIB}
    for name, value in {**given, "get_per_process_memory_fraction": share}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    assert memory.free_bytes(World(device=torch.device("cuda", 0))) == expected * GIB


def test_a_limit_on_addresses_counts() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (taken + GIB // 4, before[1]))
    try:
        assert 0 < memory.free_bytes(World()) <= GIB // 4
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_lack_of_gpu_memory_in_a_step_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Pretraining, "step", fail)
    tiny_run.write_images(tmp_path / "images")
    with pytest.raises(torch.OutOfMemoryError) as found:
        pretrain(tiny_run.config_of(tmp_path / "images", tmp_path / "run"))
    assert found.value.__notes__[0].startswith("Lower train.micro_batch")

"""What is free for a rank, and what is said when memory ends."""

from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.steps.exact import ExactStep, free_bytes
from tests.train import tiny_run

GIB = 2**30


def test_ranks_share_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    assert free_bytes(World()) == 2**20
    assert free_bytes(World(local_world_size=4)) == 2**18


@pytest.mark.parametrize(("share", "expected"), [(1.0, 12), (0.5, 8), (0.25, 2), (0.1, 0)])
def test_a_limit_on_the_gpu_memory_of_the_process_counts(
    share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may take a share of 24 GiB, holds 6 and uses 4 of them; the driver has 10 left."""
    given = {"mem_get_info": (10 * GIB, 24 * GIB), "memory_reserved": 6 * GIB, "memory_allocated": 4 * GIB}
    for name, value in {**given, "get_per_process_memory_fraction": share}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    assert free_bytes(World(device=torch.device("cuda", 0))) == expected * GIB


def test_lack_of_gpu_memory_in_a_step_says_what_to_change(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ExactStep, "__call__", fail)
    with pytest.raises(torch.OutOfMemoryError) as found:
        pretrain(tiny_run.config_of(images, tmp_path / "run"))
    assert found.value.__notes__[0].startswith("Lower train.micro_batch")

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from peclr_dali.errors import RanksLost, UserError
from peclr_dali.machine.cores import warn_of_threads
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed import world as world_module
from peclr_dali.train.distributed.world import World, described_world, joined
from peclr_dali.train.trainer import set_threads


@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_shares_are_whole_consecutive_and_even(micro_batches: int, micro_batch: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, micro_batches))
    batch = micro_batches * micro_batch
    shares = [micro_batch_share(batch, micro_batch, rank, world_size) for rank in range(world_size)]
    assert [position for share in shares for position in share] == list(range(batch))
    sizes = [len(share) for share in shares]
    assert all(size % micro_batch == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= micro_batch


def test_impossible_shares_say_what_to_change() -> None:
    with pytest.raises(UserError, match=r"batch = 10 is not a multiple of train.micro_batch = 4"):
        micro_batch_share(10, 4, 0, 1)
    with pytest.raises(UserError, match=r"batch = 64 is not a multiple of train.micro_batch = 256"):
        micro_batch_share(64, 256, 0, 1)
    with pytest.raises(UserError, match=r"holds 2 micro-batches of 4 images, fewer than the 3 ranks"):
        micro_batch_share(8, 4, 0, 3)


def test_without_torchrun_it_is_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = described_world("cpu")
    with joined(world, 1.0):
        assert world == World()
        assert world.is_main
        world.barrier()
        rows = torch.arange(6.0).view(3, 2)
        assert torch.equal(world.gather_rows(rows, range(3), 3), rows)
        assert torch.equal(world.sum_(rows.clone()), rows)
        world.sum_in_buckets_([rows])
        assert torch.equal(rows, torch.arange(6.0).view(3, 2))


def test_buckets_respect_shape_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    flats: list[torch.Tensor] = []

    def double(flat: torch.Tensor, **_: object) -> Mock:
        flats.append(flat.mul_(2))
        return Mock()

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    tensors = [
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(5.0),
        torch.ones(3, dtype=torch.float64),
        torch.arange(4.0),
        torch.ones(()),
    ]
    expected = [2 * tensor for tensor in tensors]
    World(world_size=2).sum_in_buckets_(tensors, bucket_bytes=16)
    assert [flat.numel() for flat in flats] == [96, 5, 3, 4, 1]
    flats.clear()
    World(world_size=2).sum_in_buckets_(tensors)
    assert [flat.numel() for flat in flats] == [101, 3, 5]
    assert all(torch.equal(tensor, 2 * value) for tensor, value in zip(tensors, expected, strict=True))
    assert tensors[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), torch.OutOfMemoryError),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp\nCuda failure 2 'out of memory'"),
         torch.distributed.DistBackendError),
        (RuntimeError("[gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:9"), RanksLost),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), torch.AcceleratorError),
        (RuntimeError("[gloo/gloo/transport/tcp/pair.cc:211] recv: Resource temporarily unavailable"), RanksLost),
    ],
)  # fmt: skip
def test_lack_of_memory_in_an_exchange_is_not_taken_for_a_lost_rank(
    error: RuntimeError, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    with pytest.raises(Exception) as found:  # noqa: PT011  of several kinds
        World(0, 2).sum_(torch.ones(1))
    assert type(found.value) is kind


def test_missing_gpu_is_named() -> None:
    with pytest.raises(UserError, match='device = "cuda", but torch sees no GPU'):
        described_world("cuda")


def test_why_torch_cannot_use_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a run with `device = "auto"` would go on for days on the CPU."""

    def unavailable() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver is too old (Triggered internally at x)", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    with pytest.raises(UserError, match=r"no GPU here \(CUDA initialization: The NVIDIA driver is too old\): set it"):
        described_world("cuda")
    assert described_world("auto") == World()
    (message,) = caplog.messages
    assert message == (
        "torch cannot use this machine's GPU, and the CPU is used: CUDA initialization: The NVIDIA driver is too old"
    )
    assert described_world("cpu") == World()


def test_a_launcher_that_sets_no_number_of_processes_is_told_of_missing_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    with pytest.raises(UserError, match=r"4 processes on this machine, but each sees 1 GPUs"):
        described_world()


def test_more_processes_than_gpus_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in ("0", "1"):
        given = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        monkeypatch.setattr(os, "environ", os.environ | given)
        with pytest.raises(UserError, match=r"2 processes on this machine, but each sees 1 GPUs: .* train.device=cpu"):
            described_world()
        assert described_world("cpu").rank == int(rank)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which process groups were made and destroyed, in a world of two ranks of which only one is there."""
    done: list[str] = []
    monkeypatch.setattr(world_module, "connect", lambda *arguments: dist.HashStore())
    monkeypatch.setattr(world_module, "meet", lambda store, rank, size, mine, timeout_s: [mine] * size)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(World, "barrier", lambda self: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world_module, "_connect_gpus", lambda world, limit_s: done.append("connected"))

    def init(backend: str, *, timeout: timedelta, pg_options: Any, **settings: object) -> None:
        done.append(backend)
        assert "device_id" not in settings  # NCCL would connect here, where nothing watches it
        if backend == "nccl":  # above the loader's stream, and no warning of two limits
            assert (pg_options.is_high_priority_stream, pg_options._timeout) == (True, timeout)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", lambda backend, **settings: done.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    return done


@pytest.mark.parametrize(
    ("device", "after_error"), [("cpu", ["gloo", "destroyed"]), ("cuda", ["nccl", "gloo", "connected"])]
)
def test_a_rank_that_fails_does_not_wait_for_nccl_to_end(
    device: str, after_error: list[str], groups: list[str]
) -> None:
    world = World(0, 2, 0, torch.device(device, 0), 2)
    with pytest.raises(ValueError, match="of the step"), joined(world, 1.0):
        raise ValueError("of the step")
    assert groups == after_error
    groups.clear()
    with joined(world, 1.0):
        pass
    assert groups[-1] == "destroyed"


@pytest.mark.parametrize(("group", "aborted"), [(None, 0), (Mock(), 1)], ids=["CPU", "GPU"])
def test_after_a_lost_rank_the_kernels_of_nccl_are_ended(
    group: Mock | None, aborted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it, and what frees memory of the GPU would wait for them."""
    whole = Mock()
    monkeypatch.setattr(world_module, "_peers", Mock(group=group, explain=lambda error: RanksLost("rank 1")))
    monkeypatch.setattr(dist, "group", Mock(WORLD=whole))
    monkeypatch.setattr(dist, "barrier", Mock(side_effect=RuntimeError("[gloo] Connection closed by peer")))
    with pytest.raises(RanksLost, match="rank 1"):
        World(0, 2).barrier()
    assert whole.abort.call_count == aborted


def test_ranks_that_meet_but_cannot_connect_are_told_what_to_check(
    groups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise dist.DistBackendError("Gloo connectFullMesh failed with 10.0.0.2")

    monkeypatch.setattr(dist, "init_process_group", fail)
    told = r"cannot connect to each other \(Gloo connectFullMesh .*GLOO_SOCKET_IFNAME"
    with pytest.raises(RanksLost, match=told), joined(World(0, 2, 0, torch.device("cpu"), 2), 1.0):
        pass
    assert not groups


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)  # torch's own choice, which knows no quota
    monkeypatch.setattr("peclr_dali.train.trainer.available_cores", lambda: 9)
    for threads, processes in ((None, 1), (None, 2), (None, 16), (3, 2)):
        set_threads(threads, World(world_size=processes, local_world_size=processes))
    assert chosen == [9, 4, 1, 3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    set_threads(None, World())
    assert chosen[-1] == 6


def test_many_threads_give_a_warning_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr("peclr_dali.machine.cores.available_cores", lambda: 2)
    warn_of_threads.cache_clear()
    for threads, rank in ((None, 0), (2, 0), (700, 1), (700, 0)):
        set_threads(threads, World(rank=rank, world_size=2, local_world_size=2))
    (message,) = caplog.messages
    assert message.startswith("train.threads = 700 in each of 2 processes, on 2 cores: ")

import os
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World, described_world, joined
from peclr_dali.train.runs.run import set_threads


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


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher does not tell how many processes it starts on a machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    with pytest.raises(UserError, match=r"4 processes on this machine see 1 GPUs: .* train.device=cpu"):
        described_world()
    assert described_world("cpu").rank == 3
    with pytest.raises(UserError, match="device = 'cuda:0': expected auto, cpu or cuda"):
        described_world("cuda:0")


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)  # torch's own choice, which knows no quota
    monkeypatch.setattr("peclr_dali.train.runs.run.available_cores", lambda: 9)
    for threads, processes in ((None, 1), (None, 2), (None, 16), (3, 2), (1024, 1)):
        set_threads(threads, World(world_size=processes, local_world_size=processes))
    assert chosen == [9, 4, 1, 3, 9]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    set_threads(None, World())
    assert chosen[-1] == 6

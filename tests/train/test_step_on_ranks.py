"""The exact step gives the same gradient on any number of ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from peclr_dali.models.nt_xent import NTXent
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World, buckets, described_world, joined
from peclr_dali.train.steps import micro_batches
from tests.train import ranks
from tests.train.tiny_step import (
    OfKeypoints,
    Recompute,
    assert_same,
    exact_step,
    gradients,
    images,
    network,
    part,
    plain_gradients,
    run,
    spread,
)

SAMPLES, MICRO_BATCH = 8, 2  # four micro-batches: one each on four ranks, 2 + 1 + 1 on three


def one_rank(recompute: Recompute, loss: Callable[..., torch.Tensor], folder: str) -> None:
    """Runs in a process of its own, as torchrun would start it."""
    world = described_world("cpu")
    with joined(world, 60.0):
        model = network()
        result = run(model, SAMPLES, MICRO_BATCH, recompute, world, loss)
    of_step = (result.loss, result.embeddings, result.recompute_difference)
    outcome = (repr(world), *of_step, gradients(model), list(model.buffers()))
    torch.save(outcome, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize(
    ("world_size", "recompute", "loss_of"),
    [
        (2, "auto", NTXent()),
        (2, "always", NTXent()),
        (3, "auto", NTXent()),
        (4, "auto", NTXent()),
        (2, "always", spread),
        (3, "auto", spread),
        (1, "always", OfKeypoints()),
        (3, "auto", OfKeypoints()),
    ],
)
def test_any_number_of_ranks_trains_the_same_function(
    world_size: int, recompute: Recompute, loss_of: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """Against autograd through everything at once, batch norm in train mode."""
    ranks.run_ranks(world_size, one_rank, recompute, loss_of, str(tmp_path), log=tmp_path / "log")

    loss, expected = plain_gradients(network(), SAMPLES, MICRO_BATCH, loss_of)
    model = network()
    single = run(model, SAMPLES, MICRO_BATCH, loss=loss_of)
    shares = [len(micro_batch_share(SAMPLES, MICRO_BATCH, rank, world_size)) for rank in range(world_size)]
    assert len(set(shares)) == (2 if world_size == 3 else 1)
    for rank in range(world_size):
        outcome = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        described, their_loss, embeddings, difference, their_gradients, their_buffers = outcome
        assert described == repr(World(rank, world_size, rank, torch.device("cpu"), world_size))
        assert difference == 0 if recompute == "always" else difference is None
        torch.testing.assert_close(their_loss, loss, atol=1e-12, rtol=0)
        torch.testing.assert_close(embeddings, single.embeddings, atol=1e-12, rtol=0)
        assert_same(their_gradients, expected)
        assert_same(their_buffers, list(model.buffers()))


KEPT = (0, 1, 2, None)


def one_rank_keeping_graphs(folder: str) -> None:
    """With 0, 1 and 2 graphs kept on each rank, then as many as fit on the last one, which has little memory."""
    world = described_world("cpu")
    free = 0 if world.rank == world.world_size - 1 else 2**40
    outcomes = []
    with joined(world, 60.0), patch("peclr_dali.train.steps.exact.free_bytes", lambda *_: free):
        for kept_graphs in KEPT:
            model = network()
            step = exact_step(model, batch=8, micro_batch=2, recompute="auto", world=world, kept_graphs=kept_graphs)
            result = step(part(images(8), step.share))
            tensors = [result.loss, result.embeddings, *gradients(model), *model.buffers()]
            outcomes.append((step.kept_graphs, result.recompute_difference, tensors))
    torch.save(outcomes, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_number_of_kept_graphs_changes_no_bit(world_size: int, tmp_path: Path) -> None:
    """Of three ranks, one has two micro-batches and recomputes, where the others have kept their only one."""
    ranks.run_ranks(world_size, one_rank_keeping_graphs, str(tmp_path), log=tmp_path / "log")
    for rank in range(world_size):
        outcomes = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert [kept for kept, _, _ in outcomes] == [0, 1, 2, 1]
        assert [difference for _, difference, _ in outcomes] == [0, 0, None, 0]
        for _, _, tensors in outcomes[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(tensors, outcomes[0][2], strict=True))


def test_sums_over_ranks_begin_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets of one parameter, the last first. The first layer's wait for one that the network does not use."""
    happened: list[object] = []

    def begin(world: World, gradients: list[torch.Tensor]) -> Mock:
        happened.extend(name for name, p in model.named_parameters() if p.grad is gradients[0])
        return Mock(end=lambda: happened.append("end"))

    monkeypatch.setattr(World, "begin_sum_", begin)
    monkeypatch.setattr(micro_batches, "buckets", partial(buckets, bucket_bytes=1))
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].register_parameter("unused", nn.Parameter(torch.ones(1)))
    model[1].register_full_backward_pre_hook(lambda *_: happened.append("second layer"))
    step = micro_batches.MicroBatchStep(model, batch=4, micro_batch=2, world=World(0, 2))
    step.backward(model(torch.ones(2, 1)).sum(), last=False)
    assert happened == ["second layer"]
    step.backward(model(torch.ones(2, 1)).sum(), last=True)
    step.sum_gradients()
    assert happened[1:] == ["2.bias", "2.weight", "second layer", "1.bias", "1.weight", "0.weight", *["end"] * 5]

"""`make_loader` under torchrun: two processes with DistributedDataParallel do what one does with the whole batch.

Each of them trains a few steps and writes down what it received.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from peclr_dali import Batch, EpochLoader, GeometryConfig, PipelinesConfig, make_loader
from tests.pipelines.harness import write_jpegs
from tests.train import ranks as processes

BATCH, STEPS_PER_EPOCH, SIDE_PX = 6, 4, 16
SAVED_AFTER, LEFT_AFTER, STEPS = 2, 3, 2 * STEPS_PER_EPOCH


@contextmanager
def small_loader(images: str, state: dict[str, Any] | None = None) -> Iterator[EpochLoader]:
    """The ranks are those of the environment."""
    geometry, config = GeometryConfig(side_px=SIDE_PX), PipelinesConfig(threads=1)
    with make_loader(images, batch=BATCH, seed=3, device="cpu", geometry=geometry, config=config) as loader:
        if state is not None:
            loader.load_state_dict(state)
        yield loader


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE_PX**2, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def step(network: nn.Module, batch: Batch) -> dict[str, Any]:
    """One step of gradient descent; what went in and the gradient."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    one, other = network(torch.cat([view.image.double() / 255 for view in batch.views])).chunk(2)
    loss = (one - other).square().sum(dim=1).sin().mean()  # a mean over images
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {
        "positions": batch.positions,
        "samples": batch.samples[:, 0],
        **{f"pixels {number}": view.image for number, view in enumerate(batch.views)},
        **{f"matrix {number}": view.matrix for number, view in enumerate(batch.views)},
        "gradients": [weight.grad.clone() for weight in network.parameters() if weight.grad is not None],
    }


def trained(network: nn.Module, loader: EpochLoader, steps: int) -> list[dict[str, Any]]:
    """What `steps` steps had, over as many epochs as it takes."""
    done: list[dict[str, Any]] = []
    while len(done) < steps:
        done += [step(network, batch) for batch in islice(loader, steps - len(done))]
    return done


def one_rank(images: str, out: str) -> None:
    """Leaves a loader in mid-epoch, and goes on with another from the state before."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    network = DistributedDataParallel(small_network())
    with small_loader(images) as loader:
        taken = trained(network, loader, SAVED_AFTER)
        state = loader.state_dict()
        list(islice(loader, LEFT_AFTER - SAVED_AFTER))
    with small_loader(images, state) as loader:
        weights = {key: value.clone() for key, value in network.module.state_dict().items()}
        taken += trained(network, loader, STEPS - SAVED_AFTER)
    torch.save({"steps": taken, "state": state, "weights": weights}, f"{out}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few more than fill an epoch."""
    return str(write_jpegs(tmp_path_factory.mktemp("images"), STEPS_PER_EPOCH * BATCH + 2).root)


@pytest.fixture(scope="module")
def whole(images: str) -> list[dict[str, Any]]:
    """Each step of one process with the whole batch."""
    with small_loader(images) as loader:
        return trained(small_network(), loader, STEPS)


@pytest.fixture(scope="module")
def ranks(images: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks wrote, processes in the environment that torchrun sets."""
    out = tmp_path_factory.mktemp("ranks")
    log = out / "log"
    processes.finish(processes.start_ranks(2, one_rank, images, str(out), log=log), log)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def assert_same_inputs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - {"gradients"}:
        assert torch.equal(one[name], other[name]), name


def assert_same_gradients(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The order of the sums may differ."""
    for ours, theirs in zip(one["gradients"], other["gradients"], strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-15)


def test_two_ranks_train_as_one_process_does(whole: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
    """Together they get the same batches, each image of an epoch once; DDP's gradient is that of the whole batch."""
    for single, first, second in zip(whole, ranks[0]["steps"], ranks[1]["steps"], strict=True):
        together = {key: torch.cat([first[key], second[key]]) for key in single.keys() - {"gradients"}}
        assert_same_inputs({**together, "gradients": []}, single)
        for rank in (first, second):
            assert len(rank["samples"]) == BATCH // 2
            assert_same_gradients(rank, single)
    for epoch in range(2):
        steps = slice(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        seen = [sample for rank in ranks for step in rank["steps"][steps] for sample in step["samples"].tolist()]
        assert len(set(seen)) == len(seen) == STEPS_PER_EPOCH * BATCH


def test_one_process_goes_on_from_the_state_of_two(
    images: str, whole: list[dict[str, Any]], ranks: list[dict[str, Any]]
) -> None:
    assert ranks[0]["state"] == ranks[1]["state"]
    network = small_network()
    network.load_state_dict(ranks[1]["weights"])
    with small_loader(images, ranks[1]["state"]) as loader:
        for ours, single in zip(trained(network, loader, STEPS - SAVED_AFTER), whole[SAVED_AFTER:], strict=True):
            assert_same_inputs(ours, single)
            assert_same_gradients(ours, single)

"""What a graph holds is counted, and decides whether graphs are kept."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import train.graph_memory
from tests.train.tiny_step import SIDE_PX, UNDO, Recompute, images, network, run, to_double
from train.contrastive_step import ContrastiveStep
from train.distributed import World


def test_graph_memory_counts_each_saved_block_once_and_no_parameters() -> None:
    weight = nn.Linear(16, 16, bias=False)
    x = torch.randn(1000, 16)

    def forward() -> Tensor:
        hidden: Tensor = weight(x)  # saves x and the weight
        return torch.tanh(hidden) * hidden.sin()  # saves tanh's result (twice), hidden, sin's result

    _, count = train.graph_memory.with_graph_bytes(weight, forward, torch.device("cpu"))
    assert count == 4 * 1000 * 16 * 4
    assert train.graph_memory.free_bytes(World()) > 2**20
    halved = train.graph_memory.free_bytes(World(local_world_size=2))
    assert halved == pytest.approx(train.graph_memory.free_bytes(World()) / 2, rel=0.2)


def test_measured_graph_goes_when_its_result_goes() -> None:
    tokens: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = nn.Module()
            tokens.add(ctx.token)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def forward() -> Tensor:
        x: Tensor = Node.apply(torch.ones(3, 2, requires_grad=True))  # type: ignore[no-untyped-call]
        return x * x.amax(1, keepdim=True).detach()  # as the range in the latent inverse: saved, but on no way back

    result, _ = train.graph_memory.with_graph_bytes(nn.Identity(), forward, torch.device("cpu"))
    assert len(tokens) == 1
    del result
    assert not tokens


def test_recomputing_holds_one_graph_at_a_time() -> None:
    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())
        alive.add(saved)
        return saved

    class Watched(nn.Linear):
        def forward(self, image: Tensor) -> Tensor:
            held_before.append(len(alive) > 0)
            return super().forward(image.flatten(1))

    expected: dict[Recompute, list[bool]] = {"never": [False, True, True], "always": [False] * 6}
    for recompute, held in expected.items():
        held_before: list[bool] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            run(Watched(3 * SIDE_PX**2, 4).double(), 6, 2, recompute)
        assert held_before == held
        assert not alive


def test_auto_keeps_graphs_that_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for free, expected in ((2**40, "never"), (0, "always")):
        monkeypatch.setattr("train.contrastive_step.free_bytes", lambda world, free=free: free)
        step = ContrastiveStep(network(), UNDO, batch=6, micro_batch=2, preprocess=to_double)
        assert step.recompute == "auto"
        with caplog.at_level(logging.INFO, "train.contrastive_step"):
            step(images(6))
        assert step.recompute == expected
        assert f"recompute = {expected!r}: " in caplog.text
        assert "of 3 micro-batches" in caplog.text
        caplog.clear()
        step(images(6))
        assert not caplog.text  # decided once
    assert ContrastiveStep(network(), UNDO, batch=6, micro_batch=6).recompute == "never"

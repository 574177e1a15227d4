"""What a graph holds is counted, and decides whether graphs are kept."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peclr_dali.models.network import build_network
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.steps.memory import with_graph_bytes
from tests.train.tiny_step import SIDE_PX, Recompute, exact_step, images, network, run

CONFIGS = Path(__file__).parents[2] / "configs"


def test_graph_memory_counts_each_saved_block_once_and_no_parameters() -> None:
    weight = nn.Linear(16, 16, bias=False)
    x = torch.randn(1000, 16)

    def forward() -> Tensor:
        hidden: Tensor = weight(x)  # saves x and the weight
        return torch.tanh(hidden) * hidden.sin()  # saves tanh's result (twice), hidden, sin's result

    _, count = with_graph_bytes(weight, forward, torch.device("cpu"))
    assert count == 4 * 1000 * 16 * 4


@pytest.mark.parametrize(
    ("files", "card_bytes"),
    [(("peclr_rn50.toml", "cards/rtx_11gb.toml"), 11e9), (("peclr_rn152.toml", "cards/rtx_24gb.toml"), 24e9)],
)
def test_the_graph_of_a_micro_batch_fits_the_card_of_the_overlay(files: tuple[str, ...], card_bytes: float) -> None:
    """In 0.6 of it; the rest is for temporary tensors, libraries and the loader. Counted on a CPU, in bfloat16:
    weights, gradients and Adam's two moments in float32, and what pictures add to the graph; a few are enough."""
    config = load_config(Config, [CONFIGS / name for name in files], ["encoder.weights=random"])
    built = build_network(config.encoder, config.projector)
    built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def graph_bytes(pictures: int) -> int:
        picture = torch.zeros(pictures, 3, config.geometry.side_px, config.geometry.side_px, dtype=torch.uint8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return with_graph_bytes(built, lambda: built(picture), torch.device("cpu"))[1]

    of_a_picture = (graph_bytes(6) - graph_bytes(2)) / 4
    of_the_rest = graph_bytes(2) - 2 * of_a_picture + 16 * sum(parameter.numel() for parameter in built.parameters())
    assert 2 * config.train.micro_batch * of_a_picture + of_the_rest < 0.6 * card_bytes


def test_a_measured_graph_is_freed_with_its_result() -> None:
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

    result, _ = with_graph_bytes(nn.Identity(), forward, torch.device("cpu"))
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
        monkeypatch.setattr("peclr_dali.train.steps.exact.free_bytes", lambda world, free=free: free)
        step = exact_step(network(), batch=6, micro_batch=2)
        assert step.recompute == "auto"
        with caplog.at_level(logging.INFO, "peclr_dali.train.steps.exact"):
            step(images(6))
        assert step.recompute == expected
        assert f"recompute = {expected!r}: " in caplog.text
        assert "of 3 micro-batches" in caplog.text
        caplog.clear()
        step(images(6))
        assert not caplog.text  # decided once
    assert exact_step(network(), batch=6, micro_batch=6).recompute == "never"

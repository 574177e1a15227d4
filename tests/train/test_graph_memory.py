"""What a graph holds is counted, and decides whether graphs are kept."""

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

from peclr_dali import Batch, ExactStep, World
from peclr_dali.models.network import build_network
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.steps.memory import GraphBytes, free_bytes
from tests.train import tiny_run
from tests.train.tiny_step import SIDE_PX, Recompute, assert_same, exact_step, gradients, images, network

CONFIGS = Path(__file__).parents[2] / "configs"


def bytes_of(network: nn.Module, forward: Callable[[], object]) -> int:
    graph = GraphBytes(network)
    with graph:
        forward()
    return graph.count


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: without data, and so without addresses
def test_graph_memory_counts_each_saved_block_once_and_no_parameters(device: str) -> None:
    weight = nn.Linear(16, 16, bias=False, device=device)
    x, others = torch.randn(1001, 16, device=device), []

    def forward() -> Tensor:
        others.append(torch.empty(5000))  # as by another thread: not saved
        hidden: Tensor = weight(x)  # saves x and the weight
        return torch.tanh(hidden) * hidden.sin()  # saves tanh's result (twice), hidden, sin's result

    assert bytes_of(weight, forward) == 4 * 126 * 512  # 1001 * 16 * 4 bytes, in blocks of a GPU


@pytest.mark.parametrize(
    ("files", "card_bytes"),
    [(("peclr_rn50.toml", "cards/rtx_11gb.toml"), 11e9), (("peclr_rn152.toml",), 24e9)],
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
            return bytes_of(built, lambda: built(picture))

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

    with GraphBytes(nn.Identity()):
        result = forward()
    assert len(tokens) == 1
    del result
    assert not tokens


@pytest.mark.parametrize(
    ("kept_graphs", "expected"), [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 0, 0, 0, 0]), (2, [0, 0, 1, 0]), (3, [0, 1, 2])]
)
def test_no_more_graphs_are_held_than_are_kept(kept_graphs: int, expected: list[int]) -> None:
    """Other graphs when one is built: first those of all micro-batches, then those that are built again."""

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Tensor:
        saved = tensor.detach()
        alive.add(saved)
        return saved

    held_before: list[int] = []

    class Watched(nn.Linear):
        def forward(self, image: Tensor) -> Tensor:
            held_before.append(len(alive))
            return super().forward(image.flatten(1))

    step = exact_step(Watched(3 * SIDE_PX**2, 4).double(), batch=6, micro_batch=2, kept_graphs=kept_graphs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        embedding = step.embed(images(6), slice(0, 2))
        of_a_graph = len(alive)
        del embedding
        step(images(6))
    assert [held / of_a_graph for held in held_before[1:]] == expected
    assert not alive


@pytest.mark.parametrize(
    ("fitting", "spare", "kept"),
    [(0.0, 0, 1), (1.99, 0, 1), (2.01, 0, 2), (2.99, 0, 2), (3.01, 0, 3), (99.0, 0, 3), (1.5, 1, 1), (3.01, 1, 2),
     (4.01, 1, 3)],
)  # fmt: skip
def test_auto_keeps_graphs_that_fit(
    fitting: float, spare: int, kept: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Into 80 % of what is free before the first step, with gradients twice, Adam's two moments, what is reserved."""
    model, reserved = network(), 1000
    step = exact_step(model, batch=6, micro_batch=2)
    graph_bytes = bytes_of(model, lambda: step.embed(images(6), slice(0, 2)))
    needed = fitting * graph_bytes + 4 * 8 * sum(p.numel() for p in model.parameters()) + reserved
    free = iter([needed / 0.8])  # what is free later depends on the loader
    monkeypatch.setattr("peclr_dali.train.steps.exact.free_bytes", lambda world, headroom_bytes: next(free))
    step = exact_step(model, batch=6, micro_batch=2, reserved_bytes=reserved, spare_graphs=spare)
    with caplog.at_level(logging.INFO, "peclr_dali.train.steps.exact"):
        step(images(6))
        assert step.kept_graphs == kept
        assert f"recompute = 'auto': keeps {kept} of 3 graphs" in caplog.text
        caplog.clear()
        step(images(6))
        assert not caplog.text  # decided once


@pytest.mark.parametrize(("recompute", "kept"), [("auto", 2), ("never", 3)])
def test_auto_keeps_one_graph_less_after_a_lack_of_memory(
    recompute: Recompute, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And repeats the step, from the same weights and statistics."""
    model, expected = network(), network()
    result = exact_step(expected, batch=6, micro_batch=2, recompute="never")(images(6))
    step = exact_step(model, batch=6, micro_batch=2, recompute=recompute, kept_graphs=3)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def embed(batch: Batch, rows: slice) -> Tensor:
        if len(alive) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        embedding = embed_plainly(batch, rows)
        alive.add(embedding)
        return embedding

    embed_plainly, step.embed = step.embed, embed
    if recompute == "never":
        with pytest.raises(torch.OutOfMemoryError):
            step(images(6))
    else:
        assert torch.equal(step(images(6)).loss, result.loss)
        assert_same(gradients(model), gradients(expected), relative=0)
        assert_same(list(model.buffers()), list(expected.buffers()), relative=0)
        assert "keeps 2 instead of 3 graphs" in caplog.text
    assert step.kept_graphs == kept


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
    monkeypatch.setattr(ExactStep, "__call__", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(torch.OutOfMemoryError) as found:
        pretrain(tiny_run.config_of(images, tmp_path / "run"))
    assert found.value.__notes__[0].startswith("Lower train.micro_batch")

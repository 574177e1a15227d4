"""`torch.compile` traces the networks and the loss as one graph each. The graphs run without being compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.models.losses.nt_xent import NTXent
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import Pretraining
from tests.train.tiny_run import ROOT, TINY
from tests.train.tiny_step import images

pytestmark = [
    pytest.mark.usefixtures("narrow"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:torch"),  # the tracer's own imports
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # the tracer does it
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graph_counter() -> Any:
    """A backend that counts graphs; its module takes a second to import."""
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


def traced(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """The function as one graph; a graph break is an error. The counter counts graphs."""
    counter = graph_counter()
    return torch.compile(function, backend=counter, fullgraph=True), counter


def as_loaded(samples: int) -> Batch:
    """Batches of the loader are channels-last, which matters to the tracer."""
    batch = images(samples)
    for view in batch.views:
        view.image = view.image.contiguous(memory_format=torch.channels_last)
    return batch


def test_the_pose_network_is_one_graph() -> None:
    """In training under autocast, and in evaluation; the second micro-batch of the same size needs no other."""
    network = PoseNetwork(build_encoder(EncoderConfig("resnet18", "random"), 32), PoseConfig())
    forward, counter = traced(network)
    pixels, cameras = as_loaded(4).views[0].image, torch.eye(3).expand(4, 3, 3)
    for graphs, training in enumerate((True, False), start=1):
        network.train(training)
        for micro_batch in (pixels, 255 - pixels):
            with torch.autocast("cpu", torch.bfloat16, enabled=training):
                forward(micro_batch, cameras)
            assert counter.frame_count == graphs


LARGE_CARD = ("peclr_rn50.toml", "cards/a100.toml")
SMALL = ["train.batch=12", "train.micro_batch=4", "train.device=cpu", "encoder.weights=random"]


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ((), [*TINY, "train.precision=fp32", "train.recompute=always", "train.compile=true"]),
        ((), [*TINY, "train.precision=bf16", "train.recompute=auto", "train.compile=true"]),
        pytest.param(LARGE_CARD, [*SMALL, "train.precision=bf16"], marks=pytest.mark.slow),  # traces a ResNet-50
    ],
)
def test_a_step_of_pretraining_has_one_graph(
    files: tuple[str, ...], settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all micro-batches of two steps; another one in evaluation."""
    counter = graph_counter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    config = load_config(Config, [ROOT / "configs" / name for name in files], [*settings, "geometry.side_px=8"])
    assert config.train.compile
    state = Pretraining(config, World(), 10, fresh=True)
    for _ in range(2):
        state.step(as_loaded(12))  # three micro-batches
    assert counter.frame_count == 1
    torch.compile(state.network.eval())(as_loaded(4).views[0].image)
    assert counter.frame_count == 2


class Replayed(torch.autograd.Function):
    """x @ w, as CUDA graphs would compute it: results and gradients are in the same memory in every call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, gradient)
        return result.copy_(x @ w).detach()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        x, gradient = ctx.saved_tensors
        return None, gradient.copy_(x.T @ above).detach(), None, None


@pytest.mark.parametrize(("recompute", "kept"), [("always", 0), ("auto", 1)])
def test_with_cuda_graphs_the_gradient_is_the_same(recompute: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own gradients would be wrong: `.grad` would be what the next micro-batch overwrites, and so would be the
    saved tensors of a second kept graph. Each forward pass is marked for torch as a new one."""
    modes, marks = [], Mock()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", marks)

    def as_cuda_graph(network: nn.Module, *, mode: str | None) -> Callable[[Tensor], Tensor]:
        modes.append(mode)
        (weight,) = network.parameters()
        memory = torch.empty(8, 2, dtype=weight.dtype), torch.empty_like(weight)
        return lambda image: Replayed.apply(image.flatten(1).to(weight), weight, *memory)  # type: ignore[no-untyped-call]

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3 * 8 * 8, 2))

        def forward(self, image: Tensor) -> Tensor:
            return image.flatten(1).to(self.weight) @ self.weight

    monkeypatch.setattr(torch, "compile", as_cuda_graph)
    monkeypatch.setattr("peclr_dali.train.pretrain.build_network", lambda *_: Plain())
    monkeypatch.setattr("peclr_dali.train.steps.training_state.require_memory", lambda *_: None)
    monkeypatch.setattr(Pretraining, "build_optimizer", lambda self: torch.optim.SGD(self.network.parameters()))
    common = ["train.precision=fp64", f"train.recompute={recompute}", "equivariance.variant=none", "geometry.side_px=8"]
    gradients = []
    for how in ("false", '"reduce-overhead"'):
        torch.manual_seed(0)
        config = load_config(Config, [], [*TINY, *common, f"train.compile={how}"])
        state = Pretraining(config, World(), 10, fresh=True)
        difference = state.gradient(as_loaded(12)).recompute_difference
        gradients += [weight.grad for weight in state.network.parameters()]
    assert difference == 0
    assert state.exact.kept_graphs == kept
    assert modes == ["reduce-overhead"]
    assert marks.call_count == 3 + 3 - kept
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_loss_is_one_graph_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three strips of one anchor each for either view."""
    monkeypatch.setattr("peclr_dali.models.losses.nt_xent.TILE_ELEMENTS", 6)
    embeddings = torch.randn(2, 3, 8, requires_grad=True)
    compiled, counter = traced(NTXent())
    loss, expected = compiled(embeddings), NTXent()(embeddings)
    assert counter.frame_count == 1
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(one, embeddings)[0] for one in (loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_a_graph_break_is_an_error() -> None:
    """So that the tests above can fail."""

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        traced(Asking())[0](torch.ones(3))

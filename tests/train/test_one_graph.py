"""`torch.compile` traces the networks and the loss as one graph each. The graphs run without being compiled."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from peclr_dali import NTXent
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from tests.train.tiny_run import ROOT, TINY
from tests.train.tiny_step import Pretraining, images

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


@pytest.mark.slow
def test_the_pose_network_is_one_graph() -> None:
    """In training under autocast, and in evaluation; the second micro-batch of the same size needs no other."""
    network = PoseNetwork(build_encoder(EncoderConfig("resnet18", "random"), 32), PoseConfig())
    forward, counter = traced(network)
    pixels, cameras = images(4).views[0].image, torch.eye(3).expand(4, 3, 3)
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
        pytest.param((), [*TINY, "train.precision=fp32", "train.recompute=always"], marks=pytest.mark.slow),
        ((), [*TINY, "train.precision=bf16", "train.recompute=auto"]),
        pytest.param(LARGE_CARD, [*SMALL, "train.precision=bf16"], marks=pytest.mark.slow),  # traces a ResNet-50
    ],
)
def test_a_step_of_pretraining_has_one_graph(
    files: tuple[str, ...], settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all micro-batches of two steps, which train as without it; another one in evaluation."""
    counter = graph_counter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    states = []
    for how in ("true", "false"):
        overrides = [*settings, "geometry.side_px=8", f"train.compile={how}"]
        states.append(Pretraining(load_config(Config, [ROOT / "configs" / name for name in files], overrides)))
        for _ in range(2):
            states[-1].take_step(images(12))  # three micro-batches
    state, plain = states
    assert counter.frame_count == 1
    if "train.precision=fp32" in settings:
        torch.testing.assert_close(state.network.state_dict(), plain.network.state_dict())
    torch.compile(state.network.eval())(images(4).views[0].image)
    assert counter.frame_count == 2


def test_the_loss_is_one_graph_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three strips of one anchor each for either view."""
    monkeypatch.setattr("peclr_dali.models.nt_xent.TILE_ELEMENTS", 6)
    embeddings = torch.randn(2, 3, 8, requires_grad=True)
    compiled, counter = traced(NTXent())
    loss, expected = compiled(embeddings), NTXent()(embeddings)
    assert counter.frame_count == 1
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(one, embeddings)[0] for one in (loss, expected))
    torch.testing.assert_close(ours, theirs)

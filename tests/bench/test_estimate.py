"""The estimate of the GPU path: by hand, and against the DALI graph, torch's count of operations and its optimiser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu.cards import CARDS, Card, find_card
from bench.gpu.estimate import (
    OPTIMIZER_BYTES,
    PEAK_SHARE,
    Cost,
    Source,
    find_source,
    fused_costs,
    graph_costs,
    step_cost,
    total,
)
from bench.gpu.estimate_tables import estimate
from errors import UserError
from models.network import build_network
from pipelines.config import PipelinesConfig
from pipelines.render.backends import configure_graph
from pipelines.render.dali_graph import view_pipeline
from pipelines.render.request import Request
from pipelines.samples.index import Index
from pipelines.views.augmentation import Augmentation
from tests.command_line import run_cli
from train.config.load import load_config
from train.config.pretraining import Config, OptimConfig
from train.steps.optim import build_optimizer

IMAGES = 2
HALVED_ONCE = ["geometry.scale=[1, 1]", f"train.batch={IMAGES}", "train.micro_batch=2"]
SQUARE = Source(256, 256)  # views of 128 pixels show all of it, halved once


def config_with(*overrides: str) -> Config:
    return load_config(Config, [], list(overrides))


def found(costs: Sequence[Cost], name: str) -> Cost:
    (one,) = [cost for cost in costs if cost.name == name]
    return one


def no_request() -> Request:
    raise AssertionError("this graph does not run")


GROUPS = {"decoders__Image": "decode", "Pad": "pad", "Resize": "resize", "WarpAffine": "warp", "Stack": "stack"}
OUTPUT_BYTES = {"WarpAffine": 12, "Stack": 12, "Hsv": 12, "Cast": 3}


def nodes_of_graph(config: Config, source: Source) -> Counter[str]:
    """Nodes of the graph that the loader builds, named as in the estimate, with bytes that follow from the types.

    Bytes are of a pixel of a view; a number for each image has none.
    """
    box_px = np.array([[0, 0, source.box_px]], np.float32)
    index = Index("one", Path("none"), ["none"], box_px)
    graph = configure_graph(
        index, PipelinesConfig(threads=1), torch.device("cpu"), rows=4, views=2, geometry=config.geometry
    )
    pipeline = view_pipeline(graph, Augmentation(config.geometry, config.colour), no_request)
    written: dict[str, int] = {}
    nodes: Counter[str] = Counter()
    for node in pipeline._ops:
        text = str(node._spec)
        (kind,) = re.findall(r"^OpSpec for (\w+)", text)
        inputs, output = [written[given.name] for given in node._inputs], node._outputs[0].name
        read = sum(inputs)
        written[output] = OUTPUT_BYTES.get(kind, 0)
        if kind in GROUPS:
            nodes[GROUPS[kind]] += 1
        elif kind == "Cast":
            nodes["cast"] += 1
        elif kind == "_TensorSubscript":
            written[output] = 4 if read else 0
            nodes["colours apart"] += bool(read)
        elif read:  # elementwise
            expression = re.findall(r"expression_desc: (.*)", text)
            name = expression[0] if expression else kind
            if expression:
                written[output] = 1 if re.match("lt|geq|bitand", name) else max(4, *inputs)
            nodes[f"{name}, {read} + {written[output]} B"] += 1
    return +nodes


@pytest.mark.parametrize("source", [SQUARE, Source(1280, 720, 375), Source(64, 64, 64)])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["colour.jitter=linear", "geometry.fill=edge"],
        ["colour.jitter=none", "geometry.antialias=false"],
    ],
)
def test_the_nodes_are_those_of_the_graph(overrides: list[str], source: Source) -> None:
    """Of the loader's, for all sizes of the box; without a box it has the most halvings, with a small one none."""
    config = config_with(*overrides)
    counted: Counter[str] = Counter()
    for cost in graph_costs(config, source):
        counted[re.sub(r"^resize \d$", "resize", cost.name)] += cost.nodes
    assert counted.pop("copy into the batch") == 2  # behind the graph
    assert counted == nodes_of_graph(config, source)


def test_two_nodes_by_hand() -> None:
    costs = graph_costs(config_with(*HALVED_ONCE), SQUARE)
    difference = found(costs, "sub(&0 &1), 8 + 4 B")  # ten in each of two views: two planes are read, one written
    assert (difference.read, difference.written) == (IMAGES * 20 * 8 * 128**2, IMAGES * 20 * 4 * 128**2)
    halving = found(costs, "resize 1")  # 256 x 256 bytes, 128 x 256 float32, 128 x 128 bytes; three colours, two views
    assert halving.read == IMAGES * 2 * 3 * (256 * 256 + 4 * 128 * 256)
    assert halving.written == IMAGES * 2 * 3 * (4 * 128 * 256 + 128 * 128)
    same = found(costs, "resize 2")
    assert same.read == same.written == IMAGES * 2 * 3 * 5 * 128**2


def test_all_nodes_by_hand() -> None:
    """In units of the 128 x 128 pixels of a view, for two views: the image has four units."""
    shared = (4 * 3) + (2 * 4 * 3)  # decode writes; pad reads and writes
    resize = 2 * (4 * 3 + 2 * 12 + 2 * 12 + 3) + 5 * 2 * (3 + 12 + 12 + 3)
    rest = 2 * (3 + 12) + 2 * (12 + 3) + 2 * (3 + 3)  # warp, cast, copy
    without = config_with(*HALVED_ONCE, "colour.jitter=none")
    assert total(graph_costs(without, SQUARE)).moved == IMAGES * 128**2 * (shared + resize + rest)
    elementwise = 2 * HSV_BYTES
    apart_and_stack = 2 * (3 * (12 + 4) + (12 + 12))
    exact = config_with(*HALVED_ONCE)
    assert total(graph_costs(exact, SQUARE)).moved == IMAGES * 128**2 * (
        shared + resize + rest + elementwise + apart_and_stack
    )


HSV_BYTES = 0
"""Of a pixel in the elementwise nodes of the exact jitter, added up line by line of `dali_colour._hsv`."""
for _bytes in (
    [12, 12], [12, 12, 12], [8, 8],  # value; chroma; per_chroma
    [9], [9, 9, 3], [9, 9, 3],  # is_red, is_green, is_blue
    [12, 12],  # from_red
    [5, 5, 12, 9], [12, 12, 8, 9], [12, 12, 8, 9], [12, 12], [8],  # sixths; the sums; times hue
    [8, 8, 8], [8, 12, 8, 12],  # new_value, new_chroma
    *[[8, 5, 5, 12, 8, 12, 8, 12, 12]] * 3,  # channels
):  # fmt: skip
    HSV_BYTES += sum(_bytes)


def test_one_kernel_by_hand() -> None:
    decode, kernel = fused_costs(config_with(*HALVED_ONCE), SQUARE)
    assert (decode.read, decode.written) == (0, IMAGES * 3 * 256**2)
    assert (kernel.read, kernel.written) == (IMAGES * 2 * 3 * 256**2, IMAGES * 2 * 3 * 128**2)
    _, part = fused_costs(config_with(*HALVED_ONCE), Source(512, 512, 256))
    assert (part.read, part.written) == (kernel.read, kernel.written)
    _, beyond = fused_costs(config_with(*HALVED_ONCE, "geometry.scale=[0.5, 0.5]"), SQUARE)
    assert beyond.read == kernel.read  # there is no more than the image


def test_costs_grow_with_the_batch_and_average_over_scales() -> None:
    one, many = (
        total(graph_costs(config_with(f"train.batch={batch}", "train.micro_batch=16"), SQUARE)) for batch in (16, 64)
    )
    assert many.moved == pytest.approx(4 * one.moved)
    # Half of these views need one halving: below a magnification of 0.707.
    mixed = config_with("geometry.scale=[1.31421, 1.51421]", "train.batch=16", "train.micro_batch=16")
    once, never = (
        config_with(f"geometry.scale=[{at}, {at}]", "train.batch=16", "train.micro_batch=16") for at in (1.4, 1.43)
    )
    resizes = [found(graph_costs(config, SQUARE), "resize 1").moved for config in (once, mixed, never)]
    assert resizes[1] == pytest.approx((resizes[0] + resizes[2]) / 2, rel=0.01)


@pytest.mark.parametrize(("name", "side_px"), [("resnet18", 65), ("resnet50", 128), ("resnet152", 96)])
def test_operations_are_those_that_torch_counts(name: str, side_px: int) -> None:
    config = config_with(
        f"encoder.name={name}",
        "encoder.weights=random",
        f"geometry.side_px={side_px}",
        "train.batch=2",
        "train.micro_batch=2",
    )
    cost = step_cost(config)
    with torch.device("meta"):
        network = build_network(config.encoder, config.projector, side_px)
        images = torch.zeros(4, 3, side_px, side_px, dtype=torch.uint8)
        with FlopCounterMode(display=False) as forward:
            projection = network(images)
        with FlopCounterMode(display=False) as backward:
            projection.sum().backward()
    assert cost.forward_flop == forward.get_total_flops()
    assert cost.backward_flop == backward.get_total_flops()
    assert cost.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert cost.flop(recompute=True) - cost.flop(recompute=False) == cost.forward_flop


class _Moved(TorchDispatchMode):
    """Bytes that the kernels of an optimiser read and write, if each reads its lists of tensors once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith(("_foreach_", "_fused_adam")) and _bytes_of(args[0]) > 1000:  # not the count of steps
            large = [tensors for tensors in args if isinstance(tensors, list | tuple) and _bytes_of(tensors) > 1000]
            written = {"_fused_adam_": 3, "_foreach_norm": 0}.get(name, 1)  # Adam writes no gradients
            self.bytes.append(sum(map(_bytes_of, large)) + written * _bytes_of(args[0]))
        return result


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def test_the_optimiser_moves_the_bytes_of_its_kernels() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 100))
    optimizer = build_optimizer(OptimConfig(backend="torch"), [("weight", weight)], batch=8)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with _Moved() as moved:
        optimizer.step()
    assert [each / weight.numel() for each in moved.bytes] == list(OPTIMIZER_BYTES.values())


def test_times_are_those_of_the_published_figures() -> None:
    config = config_with("encoder.weights=random")
    card = Card("card", 1e12, 1e14, None, "here")
    times = estimate(config, [SQUARE], [card])[2]
    step_ms = 1e3 * step_cost(config).flop(recompute=False) / (PEAK_SHARE * 1e14)
    graph_ms = total(graph_costs(config, SQUARE)).moved / 1e9
    assert times.lines[0][1] == f"{step_ms:.0f}"
    assert times.lines[0][4] == f"{graph_ms:.1f}"
    assert times.lines[0][5] == f"{graph_ms / step_ms:.1%}"


def test_times_of_nodes_add_up_to_the_graph_s() -> None:
    config, card = config_with(), Card("card", 1e12, 1e14, None, "here")
    for source in (SQUARE, Source(1280, 720, 375)):
        shown = estimate(config, [source], [card])[3]
        ms = {name: float(time) for name, time in shown.lines}
        graph_ms, kernel_ms = ms.pop("sum of the graph"), ms.pop("one kernel")
        assert list(ms) == ["decode", "pad", "halvings", "warp", "jitter", "cast", "copy into the batch"]
        assert sum(ms.values()) == pytest.approx(graph_ms, abs=0.05)
        assert graph_ms == pytest.approx(total(graph_costs(config, source)).moved / 1e9, abs=0.01)
        assert kernel_ms == pytest.approx(fused_costs(config, source)[1].moved / 1e9, abs=0.01)


def test_sources_may_need_different_nodes() -> None:
    """A row of the table holds the same node of each source, also if one needs no halving."""
    nodes = estimate(config_with(), [Source(64, 64, 64), Source(1280, 720, 375)], [CARDS[0]])[1]
    lines = {line[0]: line[1:] for line in nodes.lines}
    assert lines["resize 1"][:4] == ("2 or 0", "0.00", "0.00", "0.0")
    assert float(lines["resize 1"][4]) > 0
    assert lines["warp"][0] == "2"


def test_a_loader_that_would_not_hide_is_named() -> None:
    config = config_with()
    slow, fast = Card("slow", 1e11, 1e15, None, ""), Card("fast", 1e18, 1e12, None, "")
    said = estimate(config, [SQUARE], [slow, fast])[2].said
    assert "With the graph, the loader would not hide on slow." in said
    assert "With one kernel, the loader would not hide on slow." in said
    said = estimate(config, [SQUARE], [fast])[2].said
    assert said.count("would hide on all of these cards") == 2
    assert "would not hide on any" in estimate(config, [SQUARE], [slow])[2].said


PUBLISHED = {
    "A100 80 GB SXM": (2.039, 312), "H100 PCIe": (2.0, 756), "H100 SXM": (3.35, 989), "H200 SXM": (4.8, 989),
    "RTX 3090": (0.936, 71), "RTX 4090": (1.008, 165),
}  # fmt: skip
"""TB/s of the memory and dense bfloat16 TFLOP/s, from NVIDIA's data sheets, written a second time."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_of_cards_are_the_published_ones(name: str) -> None:
    card = find_card(name)
    assert (card.bytes_per_s / 1e12, card.flop_per_s / 1e12) == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_cards_and_sources_of_the_user() -> None:
    assert find_card("h100 sxm") == CARDS[7]
    own = find_card("RTX 3060,360,51")
    assert (own.name, own.bytes_per_s, own.flop_per_s) == ("RTX 3060", 360e9, 51e12)
    assert find_source("1280x720:375") == Source(1280, 720, 375)
    assert find_source("640x480") == Source(640, 480)
    for wrong in ("RTX 9999", "RTX 3060,360", "RTX 3060,360,nan", "RTX 3060,-1,51", " ,360,51"):
        with pytest.raises(UserError, match="expected one of RTX 2080 Ti"):
            find_card(wrong)
    for wrong in ("640", "0x480", "640x480:", "640x480x3"):
        with pytest.raises(UserError, match="expected width and height"):
            find_source(wrong)
    with pytest.raises(UserError, match="the estimate only knows resnet18"):
        step_cost(config_with("encoder.name=timm/vit_small_patch16_224"))


def test_the_estimate_needs_neither_torch_nor_dali() -> None:
    program = "import sys, bench.gpu.estimate_tables; sys.exit(bool({'torch', 'nvidia'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)


def test_the_command_prints_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "train.batch=512", "--card", "RTX 3060,360,51", "--source", "640x480"]
    assert run_cli("bench-gpu", "--estimate", *given) == 0
    out = capsys.readouterr().out
    assert out.startswith("Computed, not measured.")
    for words in ("batch of 512", "RTX 3060", "Sources of 640 x 480", "sub(&0 &1), 8 + 4 B"):
        assert words in out


def test_the_command_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sentence, and every line of its tables; a wide terminal breaks none of them."""
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    told = page.split("<!-- rows: gpu-estimate -->")[1].split("<!-- end rows -->")[0]
    monkeypatch.setenv("COLUMNS", "2000")
    assert run_cli("bench-gpu", "--estimate") == 0
    printed = " ".join(capsys.readouterr().out.split())
    lines = [line for line in told.splitlines() if line and not line.startswith("| ---")]
    assert len(lines) > 80
    for line in lines:
        words = line.strip("| ").replace(" | ", " ").split()
        assert " ".join(words) in printed, line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--card", "H100 SXM"], "--card: it belongs to --estimate"),
        (["--set", "train.batch=512"], "--set: it belongs to --estimate"),
        (["--estimate", "--stage", "loader"], "--estimate measures nothing"),
        (["--estimate", "--source", "large"], "--source large: expected width and height"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("bench-gpu", *arguments) == 2
    assert told in capsys.readouterr().err

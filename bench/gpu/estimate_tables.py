"""Shows the estimate of `bench.gpu.estimate` as tables, for a terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.gpu.cards import JPEG_CARD, JPEG_IMAGES_PER_S, JPEG_SOURCE, Card
from bench.gpu.estimate import (
    HIDDEN_BELOW,
    PEAK_SHARE,
    VIEWS,
    Cost,
    Source,
    StepCost,
    fused_costs,
    graph_costs,
    step_cost,
    total,
)
from train.config.pretraining import Config

_DALI_BATCH = 256  # `pipelines.batch` of small images, if it is unset
_NAMED = frozenset({"decode", "pad", "halvings", "warp", "cast", "copy into the batch"})
"""Groups of nodes with a name of their own; the others belong to the jitter."""
_FLOP_PER_S = 10e12  # less than any of these cards has outside of its matrix units


@dataclass(frozen=True)
class Shown:
    """A sentence and the table below it."""

    said: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]


def estimate(config: Config, sources: Sequence[Source], cards: Sequence[Card]) -> list[Shown]:
    """The tables: published figures, nodes, times and JPEG.

    Raises:
        UserError: the encoder's operations are not known.
    """
    step = step_cost(config)
    return [
        _published(cards),
        _nodes(config, sources),
        *(
            shown
            for source in sources
            for shown in (_times(config, step, source, cards), _stages(config, source, cards))
        ),
        _jpeg(config, step, cards),
    ]


def show(tables: Sequence[Shown]) -> None:
    """Print the tables to the terminal."""
    console = Console(width=max(Console().width, 140))
    for part in tables:
        table = Table(box=SIMPLE_HEAD)
        for heading in part.heads:
            table.add_column(heading, overflow="fold")
        for line in part.lines:
            table.add_row(*line)
        console.print(part.said, markup=False, highlight=False)
        console.print(table, markup=False)


def _published(cards: Sequence[Card]) -> Shown:
    lines = [
        (
            card.name, f"{card.bytes_per_s / 1e9:.0f}", f"{card.flop_per_s / 1e12:g}",
            {True: "yes", False: "no", None: "not known"}[card.jpeg_engines], card.source,
        )
        for card in cards
    ]  # fmt: skip
    heads = ("card", "memory, GB/s", "matrix peak, TFLOP/s", "JPEG engines", "published in")
    return Shown("Published figures. The peak is of dense 16-bit matrices, summed in float32.", heads, lines)


def _nodes(config: Config, sources: Sequence[Source]) -> Shown:
    side = config.geometry.side_px
    graphs = [graph_costs(config, source) for source in sources]
    kernels = [fused_costs(config, source) for source in sources]
    rows = {name: [_of_name(graph, name) for graph in graphs] for name in _names(graphs)}
    rows["sum of the graph"] = [total(graph) for graph in graphs]
    rows["one kernel"] = [_of_name(kernel, "one kernel") for kernel in kernels]
    rows["decode and one kernel"] = [total(kernel) for kernel in kernels]
    lines = [
        (name, _either({str(cost.nodes) for cost in costs}), *(word for cost in costs for word in _figures(cost)))
        for name, costs in rows.items()
    ]
    heads = [f"{what}, {source}" for source in sources for what in ("GB read", "GB written", "GFLOP")]
    dali_batch = config.pipelines.batch or _DALI_BATCH
    launches = min(total(graph).nodes for graph in graphs) * -(-config.train.batch // dali_batch)
    slowest_ms = 1e3 * max(total(costs).operations for costs in (*graphs, *kernels)) / _FLOP_PER_S
    said = (
        f"Nodes of the DALI graph, and one kernel in their place, for a batch of {config.train.batch} images with "
        f"{VIEWS} views of {side} pixels. An elementwise node is named by DALI's expression and by the bytes that it "
        f"reads and writes for a pixel of the view. In DALI batches of {dali_batch}, the graph runs at least "
        f"{launches} kernels a step. The operations are not the limit: at {_FLOP_PER_S / 1e12:.0f} TFLOP/s they take "
        f"at most {slowest_ms:.0f} ms."
    )
    return Shown(said, ("node", "nodes", *heads), lines)


def _names(graphs: Sequence[Sequence[Cost]]) -> list[str]:
    """The nodes of all graphs. A graph with fewer halvings lacks some nodes of another one."""
    return [cost.name for cost in max(graphs, key=len)]


def _of_name(costs: Sequence[Cost], name: str) -> Cost:
    return next((cost for cost in costs if cost.name == name), Cost(name, 0, 0, 0))


def _either(found: set[str]) -> str:
    return " or ".join(sorted(found, key=int, reverse=True))


def _stages(config: Config, source: Source, cards: Sequence[Card]) -> Shown:
    """Times of groups of nodes on each card."""
    grouped: dict[str, list[Cost]] = {}
    for cost in graph_costs(config, source):
        name = "halvings" if cost.name.startswith("resize") else cost.name
        grouped.setdefault(name if name in _NAMED else "jitter", []).append(cost)
    kernel = fused_costs(config, source)
    grouped |= {"sum of the graph": graph_costs(config, source), "one kernel": kernel[1:]}
    lines = [
        (name, *(f"{1e3 * total(costs).moved / card.bytes_per_s:.2f}" for card in cards))
        for name, costs in grouped.items()
    ]
    said = (
        f"Sources of {source}: time in ms of the graph's nodes and of the one kernel for a batch, at the card's "
        "bandwidth. The jitter is all elementwise nodes, and those that take the colours apart and stack them."
    )
    return Shown(said, ("nodes", *(card.name for card in cards)), lines)


def _figures(cost: Cost) -> tuple[str, str, str]:
    return f"{cost.read / 1e9:.2f}", f"{cost.written / 1e9:.2f}", f"{cost.operations / 1e9:.1f}"


def _times(config: Config, step: StepCost, source: Source, cards: Sequence[Card]) -> Shown:
    graph, kernel = total(graph_costs(config, source)), total(fused_costs(config, source))
    lines: list[tuple[str, ...]] = []
    too_slow: dict[str, list[str]] = {"the graph": [], "one kernel": []}
    for card in cards:
        once, twice = (1e3 * step_s(step, card, recompute=recompute) for recompute in (False, True))
        graph_ms, kernel_ms = (1e3 * cost.moved / card.bytes_per_s for cost in (graph, kernel))
        for name, ms in zip(too_slow, (graph_ms, kernel_ms), strict=True):
            if ms > HIDDEN_BELOW * once:
                too_slow[name].append(card.name)
        lines.append(
            (
                card.name, f"{once:.0f}", f"{twice:.0f}", f"{1e3 * step.optimizer_bytes / card.bytes_per_s:.2f}",
                f"{graph_ms:.1f}", f"{graph_ms / once:.1%}", f"{kernel_ms:.2f}", f"{kernel_ms / once:.2%}",
            )
        )  # fmt: skip
    said = (
        f"Sources of {source}: the graph moves {graph.moved / 1e9:.0f} GB a step, one kernel "
        f"{kernel.moved / 1e9:.2f} GB, both with the decoder's output. {_verdict(too_slow, len(cards))} The step is "
        f"{config.encoder.name}, {step.flop(recompute=False) / 1e12:.1f} TFLOP "
        f"({step.flop(recompute=True) / 1e12:.1f} with recomputation), at {PEAK_SHARE:.0%} of the peak; LARS and Adam "
        f"move {step.optimizer_bytes / 1e9:.2f} GB. Times in ms; shares are of the step without recomputation."
    )
    heads = ("card", "step", "recomputed", "LARS + Adam", "graph", "share", "one kernel", "share")
    return Shown(said, heads, lines)


def _verdict(too_slow: dict[str, list[str]], cards: int) -> str:
    told = []
    for name, where in too_slow.items():
        on = "on any of these cards" if len(where) == cards else f"on {', '.join(where)}"
        told.append(f"With {name}, the loader would {f'not hide {on}' if where else 'hide on all of these cards'}.")
    return " ".join(told)


def step_s(step: StepCost, card: Card, *, recompute: bool) -> float:
    """Seconds of a step at the assumed share of a card's peak."""
    return step.flop(recompute=recompute) / (PEAK_SHARE * card.flop_per_s)


def _jpeg(config: Config, step: StepCost, cards: Sequence[Card]) -> Shown:
    batch, known = config.train.batch, [card for card in cards if card.name.startswith(JPEG_CARD)]
    lines: list[tuple[str, ...]] = []
    said = f"What JPEG decoding takes is known for the {JPEG_CARD} only, from {JPEG_SOURCE}."
    if known:
        shares = []
        for way, rate in JPEG_IMAGES_PER_S.items():
            shares.append(batch / rate / step_s(step, known[0], recompute=False))
            lines.append((JPEG_CARD, way, f"{rate:.0f}", f"{1e3 * batch / rate:.0f}", f"{shares[-1]:.0%}"))
        pace = "it would set the pace" if min(shares) > 1 else "the fastest way would keep up"
        said += (
            f" The sizes of its images are not quoted. Decoding of such images would take {min(shares):.0%} to "
            f"{max(shares):.0%} of the step's time: {pace}. Engines work beside the step; the other ways share the "
            "card with it."
        )
    others = ", ".join(card.name for card in cards if card not in known)
    if others:
        lines.append((others, "any", "not known", "not known", "not known"))
    return Shown(said, ("card", "way", "published images/s", f"ms for {batch} images", "of the step's time"), lines)

"""`bench-scale`: measures exchanges and step on the ranks of a run, and projects to more nodes (docs/cluster.md).

In the model of a step nothing overlaps. A step is: all micro-batches, one after the other; the exchange of the
embeddings and of their gradient; one sum of the weights' gradients.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from rich.table import Table

from bench.rows import describe_machine
from bench.training.step import wait_for, with_train
from bounds import Count, NotNegative, Positive
from errors import UserError
from models.network import build_network
from pipelines.batch import Batch, View
from pipelines.samples.shares import micro_batch_share
from train.config.pretraining import Config
from train.distributed.world import World, described_world, joined
from train.pretrain import Pretraining
from train.trainer import set_threads

_SUM_SIZES = tuple(4**power for power in range(2, 13))  # 16 B to 16 MiB


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Link:
    """Latency and bandwidth of a link, fitted to sums over ranks.

    Attributes:
        latency_s: latency of one hop.
        bytes_per_s: bandwidth in one direction; between nodes, of all network cards of a node together.
    """

    latency_s: Positive = 2e-5
    bytes_per_s: Positive = 1e10


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Cluster:
    """A cluster, as its TOML file describes it. Measure the times with `bench-scale` on one rank and on one node.

    Attributes:
        gpus_per_node: ranks on a node.
        inside: the link between the GPUs of a node.
        between: the link between nodes.
        micro_batch_s: forward and backward pass of one micro-batch on one GPU.
        fixed_s: time of a step that does not depend on the batch: optimiser, launches.
        image_bytes: size of an image file.
        storage_bytes_per_s: rate of the storage for all nodes together; 0 leaves it out.
    """

    gpus_per_node: Count = 8
    inside: Link = Link(1e-5, 2e11)
    between: Link = Link(2e-5, 2.5e10)
    micro_batch_s: Positive = 0.1
    fixed_s: NotNegative = 0.01
    image_bytes: Positive = 1e4
    storage_bytes_per_s: NotNegative = 0.0


@dataclass(frozen=True)
class Work:
    """Sizes of one optimiser step: images, numbers in an embedding, parameters of the network."""

    batch: int
    micro_batch: int
    embedding_dim: int
    parameters: int


@dataclass(frozen=True)
class Projection:
    """Projected time of one step, in seconds by cause.

    Attributes:
        nodes: number of nodes.
        ranks: GPUs that have work.
        compute_s: micro-batches, as if every rank had the same number.
        uneven_s: waiting for the ranks that have one micro-batch more.
        fixed_s: work of every rank that does not depend on its share.
        embeddings_s: the exchange of the embeddings and of their gradient.
        gradients_s: the sum of the weights' gradients.
        storage_s: time by which reading the images exceeds the rest.
        step_s: sum of all causes: only reading overlaps with the rest.
        efficiency: speed per rank over the speed of a single rank.
        limit: the largest cause besides computing.
    """

    nodes: int
    ranks: int
    compute_s: float
    uneven_s: float
    fixed_s: float
    embeddings_s: float
    gradients_s: float
    storage_s: float
    step_s: float
    efficiency: float
    limit: str


@dataclass(frozen=True)
class ScalingTimes:
    """Measurements on the ranks of this run.

    Attributes:
        ranks: number of ranks.
        sums: (bytes, seconds) of each sum over all ranks; empty with one rank.
        micro_batch_s: as in `Cluster`, from steps of two sizes.
        fixed_s: as in `Cluster`, without the exchanges.
        step_s: time of the whole step, exchanges included.
        load: the system's load average over the minute before the measurement.
    """

    ranks: int
    sums: list[tuple[int, float]]
    micro_batch_s: float
    fixed_s: float
    step_s: float
    load: float = 0.0


def sum_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Time of a sum over ranks: the faster of a ring (bandwidth) and a tree (latency).

    Ring: 2 (R - 1) hops of S / R bytes each. Tree: 2 log2 R hops of all S bytes each.
    """
    if ranks == 1:
        return 0.0
    ring = 2 * (ranks - 1) * (link.latency_s + size_bytes / ranks / link.bytes_per_s)
    tree = 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * size_bytes / link.bytes_per_s
    return min(ring, tree)


def fit_link(sums: Sequence[tuple[int, float]], ranks: int) -> Link:
    """Fit latency and bandwidth to measured sums: least squares of the relative error of `sum_s`'s ring.

    Raises:
        ValueError: fewer than two sizes, or fewer than two ranks.
    """
    if len(sums) < 2 or ranks < 2:
        raise ValueError(f"{len(sums)} sizes over {ranks} ranks do not give a latency and a bandwidth")
    sizes, seconds = (torch.tensor(column, dtype=torch.float64) for column in zip(*sums, strict=True))
    hops = 2 * (ranks - 1)
    terms = torch.stack([torch.full_like(sizes, hops), hops * sizes / ranks], dim=1) / seconds[:, None]
    latency_s, s_per_byte = torch.linalg.lstsq(terms, torch.ones_like(seconds)[:, None]).solution.flatten().tolist()
    return Link(max(latency_s, 1e-9), 1 / max(s_per_byte, 1e-15))


def project_step(work: Work, cluster: Cluster, nodes: int) -> Projection:
    """Project one step to `nodes` nodes. Ranks without a micro-batch are not counted."""
    micro_batches = work.batch // work.micro_batch
    ranks = min(nodes * cluster.gpus_per_node, micro_batches)
    used = math.ceil(ranks / cluster.gpus_per_node)
    link = cluster.inside if used == 1 else cluster.between
    even_s = micro_batches / ranks * cluster.micro_batch_s
    longest_s = math.ceil(micro_batches / ranks) * cluster.micro_batch_s
    embeddings_s = 2 * sum_s(2 * work.batch * work.embedding_dim * 4, ranks, link)
    gradients_s = sum_s(work.parameters * 4, ranks, link)
    fixed_s = cluster.fixed_s
    reading_s = work.batch * cluster.image_bytes / cluster.storage_bytes_per_s if cluster.storage_bytes_per_s else 0.0
    storage_s = max(0.0, reading_s - (longest_s + fixed_s + embeddings_s + gradients_s))
    losses_s = {
        "uneven numbers of micro-batches": longest_s - even_s,
        "fixed cost of a step": fixed_s,
        "exchange of embeddings": embeddings_s,
        "sum of gradients": gradients_s,
        "storage": storage_s,
    }
    step_s = sum([even_s, *losses_s.values()])
    cause, cause_s = max(losses_s.items(), key=lambda item: item[1])
    return Projection(
        nodes=used,
        ranks=ranks,
        compute_s=even_s,
        uneven_s=longest_s - even_s,
        fixed_s=fixed_s,
        embeddings_s=embeddings_s,
        gradients_s=gradients_s,
        storage_s=storage_s,
        step_s=step_s,
        efficiency=(even_s * ranks + fixed_s) / (ranks * step_s),
        limit=cause if cause_s > 0 else "nothing",
    )


def work_of(config: Config) -> Work:
    """The sizes of the training step that a configuration describes."""
    with torch.device("meta"):
        encoder = dataclasses.replace(config.encoder, weights="random")
        network = build_network(encoder, config.projector)
    count = sum(parameter.numel() for parameter in network.parameters())
    return Work(config.train.batch, config.train.micro_batch, config.projector.dim, count)


def measure_scaling(config: Config, *, repeats: int = 5) -> tuple[ScalingTimes, World]:
    """Time sums over the ranks of this run, and steps on noise. Under torchrun, every rank calls this.

    Raises:
        UserError: as `pretrain`, for the device and the sizes.
    """
    load = os.getloadavg()[0]
    world = described_world(config.train.device)
    batch, micro_batch = config.train.batch, config.train.micro_batch
    if micro_batch < 2:
        raise UserError("train.micro_batch = 1: steps of one micro-batch are timed, and a batch has 2 images or more")
    share = micro_batch_share(batch, micro_batch, world.rank, world.world_size)
    set_threads(config.train.threads, world)
    with joined(world, config.run.rank_timeout_s):
        sums = _sums(world) if world.world_size > 1 else []
        step_s = _step_s(config, world, len(share), repeats)
        alone = World(device=world.device)
        one_s, two_s = (
            _step_s(with_train(config, batch=count * micro_batch), alone, count * micro_batch, repeats)
            for count in (1, 2)
        )
        slowest = world.max_(torch.tensor([two_s - one_s, 2 * one_s - two_s, step_s], dtype=torch.float64)).tolist()
    return ScalingTimes(world.world_size, sums, max(slowest[0], 1e-9), max(slowest[1], 0.0), slowest[2], load), world


def summary(row: Mapping[str, Any]) -> str:
    """The measurements in one or two lines."""
    measured, here = row["measured"], row["here"]
    said = (
        f"measured here, {measured['ranks']} ranks: {here['micro_batch_s']:.4f} s per micro-batch, "
        f"{here['fixed_s']:.4f} s fixed, {measured['step_s']:.4f} s per step (the model says "
        f"{row['step_s_predicted_here']:.4f} s)"
    )
    if measured["ranks"] > 1:
        said += f"\nsums over the ranks: {here['inside']['latency_s'] * 1e6:.0f} us per hop, "
        said += f"{here['inside']['bytes_per_s'] / 1e9:.2f} GB/s"
    return said


def as_table(row: Mapping[str, Any]) -> Table:
    """A table of the projections by cause."""
    table = Table(title="PROJECTION, not a measurement: one optimiser step")
    for title in ("nodes", "ranks", "step s", "images/s", "efficiency"):
        table.add_column(title, justify="right")
    table.add_column("limited first by")
    for one in row["projection"]:
        figures = f"{one['step_s']:.4f}", f"{row['work']['batch'] / one['step_s']:.0f}", f"{one['efficiency']:.0%}"
        table.add_row(str(one["nodes"]), str(one["ranks"]), *figures, one["limit"])
    return table


def as_json(measured: ScalingTimes, work: Work, described: Cluster | None, nodes: Sequence[int]) -> dict[str, Any]:
    """A row of bench/results/ with projections to `nodes` nodes of a cluster, or of nodes like this machine."""
    here = this_machine(measured)
    cluster = described or here
    predicted = project_step(work, here, 1)
    projections = dict.fromkeys(project_step(work, cluster, count) for count in nodes)  # nodes beyond that have no work
    return {
        "bench": "scaling",
        "machine": describe_machine(),
        "work": asdict(work),
        "measured": asdict(measured),
        "here": asdict(here),
        "step_s_predicted_here": predicted.step_s,
        "error_here": predicted.step_s / measured.step_s - 1,
        "errors_of_sums": [sum_s(size, measured.ranks, here.inside) / seconds - 1 for size, seconds in measured.sums],
        "cluster": asdict(cluster),
        "projection": [asdict(one) for one in projections],
    }


def this_machine(measured: ScalingTimes) -> Cluster:
    """A cluster whose node is this machine, from the measurements."""
    link = fit_link(measured.sums, measured.ranks) if measured.ranks > 1 else Link()
    return Cluster(
        measured.ranks, inside=link, between=link, micro_batch_s=measured.micro_batch_s, fixed_s=measured.fixed_s
    )


def _step_s(config: Config, world: World, count: int, repeats: int) -> float:
    """Median seconds of an optimiser step on noise, without the first one."""
    encoder = dataclasses.replace(config.encoder, weights="random")
    state = Pretraining(dataclasses.replace(config, encoder=encoder), world, 100, fresh=True)
    batch = _noise(count, config.geometry.side_px).to(world.device)
    return _median_s(world, repeats, lambda: state.step(batch))


def _noise(count: int, side_px: int) -> Batch:
    matrix = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).repeat(count, 1, 1)
    views = tuple(
        View(torch.randint(0, 256, (count, 3, side_px, side_px), dtype=torch.uint8), matrix, matrix) for _ in range(2)
    )
    return Batch(views, torch.arange(count), torch.arange(count))


def _sums(world: World) -> list[tuple[int, float]]:
    """Bytes and seconds of float32 sums over two ranks or more, on the slowest rank."""
    medians_s = []
    for size in _SUM_SIZES:
        tensor = torch.zeros(size // 4, device=world.device)
        medians_s.append(_median_s(world, 9, partial(world.sum_, tensor)))
    slowest_s = world.max_(torch.tensor(medians_s, dtype=torch.float64)).tolist()
    return list(zip(_SUM_SIZES, slowest_s, strict=True))


def _median_s(world: World, repeats: int, action: Callable[[], object]) -> float:
    """Median seconds of an action of all ranks. It is run once more before, and that run is not counted."""
    times = []
    for _ in range(repeats + 1):
        world.barrier()
        start = time.perf_counter()
        action()
        wait_for(world.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

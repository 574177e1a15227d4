"""`bench-scale`: what the exchanges and the step cost here, and a projection to more nodes (docs/cluster.md).

The model is of this project's step, in which nothing overlaps: micro-batches one after the other, then the exchange of
the embeddings and of their gradient, then one sum of the weights' gradients.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from rich.table import Table

from bench.rows import describe_machine
from bench.training.step import with_train
from bounds import Count, NotNegative, Positive
from models.network import build_network
from pipelines.batch import Batch, View
from train.config.pretraining import Config
from train.distributed.world import World, described_world, joined, micro_batch_share
from train.pretrain import Pretraining
from train.trainer import set_threads

_SUM_SIZES = tuple(4**power for power in range(2, 13))  # 16 B to 16 MiB


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Link:
    """Latency and bandwidth of a link, as a sum over ranks sees them.

    Attributes:
        latency_s: of one hop.
        bytes_per_s: in one direction; between nodes, of all of a node's network cards together.
    """

    latency_s: Positive = 2e-5
    bytes_per_s: Positive = 1e10


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Cluster:
    """A cluster, as its TOML file describes it; times are measured there, by `bench-scale` on one rank and on one node.

    Attributes:
        gpus_per_node: ranks on a node.
        inside: the link between the GPUs of a node.
        between: the link between nodes.
        micro_batch_s: forward and backward pass of one micro-batch on one GPU.
        fixed_s: of a step, whatever its batch: optimiser, launches.
        image_bytes: an image file.
        storage_bytes_per_s: that the storage gives to all nodes together; 0 leaves it out.
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
    """What one optimiser step has to do: images; numbers of one embedding and of the network."""

    batch: int
    micro_batch: int
    embedding_dim: int
    parameters: int


@dataclass(frozen=True)
class Projection:
    """One step on some nodes, in seconds by cause.

    Attributes:
        nodes: of the cluster.
        ranks: GPUs that have work.
        compute_s: micro-batches, if they could be dealt out evenly.
        uneven_s: what waiting for the ranks with one micro-batch more costs.
        fixed_s: what every rank does whatever its share.
        embeddings_s: the exchange of the embeddings and of their gradient.
        gradients_s: the sum of the weights' gradients.
        storage_s: what reading the images takes longer than the rest.
    """

    nodes: int
    ranks: int
    compute_s: float
    uneven_s: float
    fixed_s: float
    embeddings_s: float
    gradients_s: float
    storage_s: float

    @property
    def _losses_s(self) -> dict[str, float]:
        return {
            "micro-batches cannot be dealt evenly": self.uneven_s,
            "fixed cost of a step": self.fixed_s,
            "exchange of embeddings": self.embeddings_s,
            "sum of gradients": self.gradients_s,
            "storage": self.storage_s,
        }

    @property
    def step_s(self) -> float:
        """All of it: nothing overlaps but reading."""
        return sum([self.compute_s, *self._losses_s.values()])

    @property
    def efficiency(self) -> float:
        """Speed per rank, of that of one rank that does the whole step alone."""
        return (self.compute_s * self.ranks + self.fixed_s) / (self.ranks * self.step_s)

    @property
    def limit(self) -> str:
        """What costs the most besides the computing itself."""
        cause, longest_s = max(self._losses_s.items(), key=lambda item: item[1])
        return cause if longest_s > 0 else "nothing"


@dataclass(frozen=True)
class Measured:
    """What was measured on the ranks at hand.

    Attributes:
        ranks: how many.
        sums: (bytes, seconds) of sums over all ranks; empty with one rank.
        micro_batch_s: see `Cluster`, from two sizes of share.
        fixed_s: see `Cluster`; without the exchanges.
        step_s: of the whole step, exchanges included.
        load: processes that wanted a core before anything was measured, a mean over a minute.
    """

    ranks: int
    sums: list[tuple[int, float]]
    micro_batch_s: float
    fixed_s: float
    step_s: float
    load: float = 0.0


def sum_s(size_bytes: float, ranks: int, link: Link) -> float:
    """A sum over ranks: the better of a ring (bandwidth) and a tree (latency).

    Ring: 2 (R - 1) hops, each of S / R bytes. Tree: up and down log2 R levels, all bytes on each way.
    """
    if ranks == 1:
        return 0.0
    ring = 2 * (ranks - 1) * (link.latency_s + size_bytes / ranks / link.bytes_per_s)
    tree = 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * size_bytes / link.bytes_per_s
    return min(ring, tree)


def fit_link(sums: Sequence[tuple[int, float]], ranks: int) -> Link:
    """Latency and bandwidth that explain measured sums: least squares of the relative error of `sum_s`'s ring.

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


def project(work: Work, cluster: Cluster, nodes: int) -> Projection:
    """One step on so many nodes; ranks beyond one per micro-batch have no work and are not counted."""
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
    return Projection(used, ranks, even_s, longest_s - even_s, fixed_s, embeddings_s, gradients_s, storage_s)


def work_of(config: Config) -> Work:
    """The sizes of a configuration's step."""
    with torch.device("meta"):
        encoder = dataclasses.replace(config.encoder, weights="random")
        network = build_network(encoder, config.projector)
    count = sum(parameter.numel() for parameter in network.parameters())
    return Work(config.train.batch, config.train.micro_batch, config.projector.dim, count)


def measure_scaling(config: Config, *, repeats: int = 5) -> tuple[Measured, World]:
    """Time sums over the ranks at hand, and steps on noise; under torchrun, every rank calls this.

    Raises:
        UserError: as `pretrain`, for the device and the sizes.
    """
    load = os.getloadavg()[0]
    world = described_world(config.train.device)
    batch, micro_batch = config.train.batch, config.train.micro_batch
    share = micro_batch_share(batch, micro_batch, world.rank, world.world_size)
    set_threads(config.train.threads, world)
    with joined(world, config.run.rank_timeout_s):
        sums = list(zip(_SUM_SIZES, time_sums(world, _SUM_SIZES), strict=True)) if world.world_size > 1 else []
        step_s = _step_s(config, world, len(share), repeats)
        alone = World(device=world.device)
        one_s, two_s = (
            _step_s(with_train(config, batch=count * micro_batch), alone, count * micro_batch, repeats)
            for count in (1, 2)
        )
        slowest = world.max_(torch.tensor([two_s - one_s, 2 * one_s - two_s, step_s], dtype=torch.float64)).tolist()
    return Measured(world.world_size, sums, max(slowest[0], 1e-9), max(slowest[1], 0.0), slowest[2], load), world


def summary(row: Mapping[str, Any]) -> str:
    """What was measured, in a line or two."""
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
    """What is projected, by cause."""
    table = Table(title="PROJECTION, not a measurement: one optimiser step")
    for title in ("nodes", "ranks", "step s", "images/s", "efficiency"):
        table.add_column(title, justify="right")
    table.add_column("limited first by")
    for one in row["projection"]:
        figures = f"{one['step_s']:.4f}", f"{row['work']['batch'] / one['step_s']:.0f}", f"{one['efficiency']:.0%}"
        table.add_row(str(one["nodes"]), str(one["ranks"]), *figures, one["limit"])
    return table


def as_json(measured: Measured, work: Work, described: Cluster | None, nodes: Sequence[int]) -> dict[str, Any]:
    """A row of bench/results/, with projections to so many nodes of a cluster, or of nodes such as this machine."""
    here = this_machine(measured)
    cluster = described or here
    predicted = project(work, here, 1)
    projections = dict.fromkeys(project(work, cluster, count) for count in nodes)  # more nodes have no work
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
        "projection": [
            {**asdict(one), "step_s": one.step_s, "efficiency": one.efficiency, "limit": one.limit}
            for one in projections
        ],
    }


def this_machine(measured: Measured) -> Cluster:
    """The ranks at hand as one node, with what was fitted to them."""
    link = fit_link(measured.sums, measured.ranks) if measured.ranks > 1 else Link()
    return Cluster(
        gpus_per_node=measured.ranks,
        inside=link,
        between=link,
        micro_batch_s=measured.micro_batch_s,
        fixed_s=measured.fixed_s,
    )


def _step_s(config: Config, world: World, count: int, repeats: int) -> float:
    """Median seconds of an optimiser step on noise, after one that does not count."""
    encoder = dataclasses.replace(config.encoder, weights="random")
    state = Pretraining(dataclasses.replace(config, encoder=encoder), world, 100, fresh=True)
    batch = _noise(count, config.geometry.side_px).to(world.device)
    times = []
    for _ in range(repeats + 1):
        world.barrier()
        start = time.perf_counter()
        state.step(batch).loss.item()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _noise(count: int, side_px: int) -> Batch:
    matrix = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).repeat(count, 1, 1)
    views = tuple(
        View(torch.randint(0, 256, (count, 3, side_px, side_px), dtype=torch.uint8), matrix, matrix) for _ in range(2)
    )
    return Batch(views, torch.arange(count), torch.arange(count))


def time_sums(world: World, sizes_bytes: Sequence[int], *, repeats: int = 9) -> list[float]:
    """Seconds of a sum over all ranks of so many bytes of float32, the median of some repeats, of the slowest rank.

    Args:
        world: at least two ranks.
        sizes_bytes: multiples of 4.
        repeats: of each size, after one that does not count.
    """
    medians = []
    for size in sizes_bytes:
        tensor = torch.zeros(size // 4, device=world.device)
        times = []
        for _ in range(repeats + 1):
            world.barrier()
            start = time.perf_counter()
            world.sum_(tensor)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[1:]))
    return world.max_(torch.tensor(medians, dtype=torch.float64)).tolist()
